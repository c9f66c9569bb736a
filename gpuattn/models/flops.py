"""Model FLOPs of a training step, independent of the implementation.

As the field counts them: six for every weight of a linear layer and token that meets it (two
forward, four backward: the usual 6 N T), with the output layer but without the embedding lookup,
and 12 d for every visible pair of query and key in each attention of width d (half of T * T when
causal). Recomputation, padding and the padded rows of a vocabulary do not count. The last layer of
an encoder counts for all tokens, though models compute only the rows of it that a loss reads.
Kaplan et al., "Scaling Laws for Neural Language Models" (2020).
"""

from typing import Any

import numpy as np


def encoder_decoder_flops(config: Any, source: Any, target: Any) -> float:
    """Return the FLOPs of a step on sentences with ``source`` and ``target`` tokens, (B,) each.

    ``config``: a TranslationConfig. Lengths include the marks for beginning and end.
    """
    source, target = (np.asarray(lengths, np.float64) for lengths in (source, target))
    encoder, decoder = config.layers
    of_source, of_target = encoder_decoder_weights(config)
    pairs = encoder * source @ source + decoder * (target @ target / 2 + source @ target)
    products = of_source * source.sum() + of_target * target.sum()
    return float(6 * products + 12 * config.d_model * pairs)


def decoder_flops(config: Any, lengths: Any) -> float:
    """Return the FLOPs of a step on rows of so many tokens, (B,). ``config``: a GPT2Config."""
    lengths = np.asarray(lengths, np.float64)
    pairs = config.layers * (lengths @ lengths) / 2
    width = config.heads * config.head_size
    return float(6 * decoder_weights(config) * lengths.sum() + 12 * width * pairs)


def encoder_flops(config: Any, lengths: Any) -> float:
    """Return the FLOPs of a step on rows of so many tokens, (B,). ``config``: a BertConfig."""
    lengths = np.asarray(lengths, np.float64)
    pairs = config.layers * (lengths @ lengths)
    return float(6 * config.token_weights() * lengths.sum() + 12 * config.d_model * pairs)


def encoder_decoder_weights(config: Any) -> tuple[int, int]:
    """Return how many weights of linear layers a source token meets, and a target token."""
    encoder, decoder = config.layers
    queries, keys, feed_forward = _weights(config)
    of_source = encoder * (queries + keys + feed_forward) + decoder * keys  # of the memory
    of_target = decoder * (2 * queries + keys + feed_forward) + config.d_model * config.vocab
    return of_source, of_target


def decoder_weights(config: Any) -> int:
    """Return how many weights of linear layers a token meets."""
    return config.layers * sum(_weights(config)) + config.d_model * config.vocab


def prompt_weights(config: Any) -> int:
    """Return how many weights of linear layers a token of a prompt meets before generation.

    Of the last layer those of keys and values: nobody reads its result.
    """
    queries, keys, feed_forward = _weights(config)
    return config.layers * keys + (config.layers - 1) * (queries + feed_forward)


def layer_weights(config: Any) -> int:
    """Return how many numbers the matrices in the layers of a ModelConfig's model hold."""
    queries, keys, feed_forward = _weights(config)
    return sum(
        layers * ((1 + crosses) * (queries + keys) + feed_forward)
        for layers, crosses in config.stacks
    )


def _weights(config):
    """Return a layer's weights: of queries and output, of keys and values, of the feed-forward."""
    width, heads = config.d_model, config.kv_heads or config.heads
    matrices = 3 if config.activation == "swiglu" else 2
    queries, keys = config.heads * config.head_size, heads * config.head_size
    return 2 * width * queries, 2 * width * keys, matrices * width * config.ffn
