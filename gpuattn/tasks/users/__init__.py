"""What trained models are used with: translating, continuing, embedding, classifying, guessing."""
