"""The FLOPs that a training step of a model is worth, whatever computes it.

As the field counts them: six for every weight of a linear layer and token that meets it (two
forward, four backward: the famous 6 N T), the output layer included and the look-up of embeddings
not, and 12 d for every visible pair of query and key in each attention of width d (half of T * T
when causal). What is computed twice does not count, nor do padding and a vocabulary's padded rows.
Kaplan et al., "Scaling Laws for Neural Language Models" (2020).
"""

import numpy as np


def translation_flops(config, source, target):
    """Return the FLOPs of a step on sentences with ``source`` and ``target`` tokens, (B,) each.

    ``config``: a TranslationConfig. Lengths hold the marks; pairs are counted by them.
    """
    source, target = (np.asarray(lengths, np.float64) for lengths in (source, target))
    encoder, decoder = config.layers
    of_source, of_target = translation_weights(config)
    pairs = encoder * source @ source + decoder * (target @ target / 2 + source @ target)
    products = of_source * source.sum() + of_target * target.sum()
    return float(6 * products + 12 * config.d_model * pairs)


def gpt2_flops(config, rows, tokens):
    """Return the FLOPs of a step on so many ``rows`` of ``tokens`` each. ``config``: GPT2Config."""
    pairs = config.layers * rows * tokens**2 / 2
    products = gpt2_weights(config) * rows * tokens
    return float(6 * products + 12 * config.d_model * pairs)


def translation_weights(config):
    """Return how many weights of linear layers a source token meets, and a target token."""
    encoder, decoder = config.layers
    queries, keys, feed_forward = _weights(config, config.ffn)
    of_source = encoder * (queries + keys + feed_forward) + decoder * keys  # of the memory
    of_target = decoder * (2 * queries + keys + feed_forward) + config.d_model * config.vocab
    return of_source, of_target


def gpt2_weights(config):
    """Return how many weights of linear layers a token meets."""
    inside = config.layers * sum(_weights(config, 4 * config.d_model))
    return inside + config.d_model * config.vocab


def _weights(config, hidden):
    """Return a layer's weights: of queries and output, of keys and values, of the feed-forward."""
    width = config.d_model
    shared = (config.kv_heads or config.heads) / config.heads
    matrices = 3 if config.activation == "swiglu" else 2
    return 2 * width**2, 2 * shared * width**2, matrices * width * hidden
