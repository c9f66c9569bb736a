"""Built-in pairs, tokenizers, text files and packed batches."""
