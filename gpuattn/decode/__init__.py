"""Generating text with any model that can step: greedily, by beam search, by sampling.

Settings, and those that other programs have: ``options``.
"""
