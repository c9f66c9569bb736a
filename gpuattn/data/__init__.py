"""Built-in tasks, tokenizers, text files and packed batches."""
