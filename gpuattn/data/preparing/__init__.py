"""Texts to token stores: sources, tokenizing in parallel, writing part by part."""
