"""Generating text with any model that can step: greedily, by beam search, by sampling."""
