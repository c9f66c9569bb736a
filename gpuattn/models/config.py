"""What the configurations of the models have in common."""

from gpuattn.errors import ConfigError, problem

ROWS = 64  # tables of the vocabulary have a multiple of so many rows: products are faster
CHOICES = {
    "norm": ("pre", "post"),
    "positions": ("sinusoidal", "learned", "rotary"),
    "activation": ("relu", "gelu", "gelu_exact", "swiglu"),
}
# What is computed again in the backward pass to save memory: nothing; layers, of which only the
# inputs are kept; with "full", no more than a slice of the logits exists at a time, as otherwise
# where they are large.
CHECKPOINT = ("none", "block", "full")


def padded_rows(vocab):
    """Return how many rows a table for ``vocab`` tokens has."""
    return -(-vocab // ROWS) * ROWS


def table_rows(config):
    """Return how many rows the tables of a model have: those of the vocabulary, or padded ones."""
    return padded_rows(config.vocab) if config.pad_vocab else config.vocab


def check_config(config, choices=CHOICES, **sizes):
    """Raise ConfigError unless sizes are positive, heads divide the width and choices are known.

    ``config``: a dataclass with ``d_model``, ``heads``, ``kv_heads``, ``positions``, ``dropout``,
    ``pad_vocab`` and any other of ``choices``.
    """
    name = type(config).__name__
    sizes |= {"d_model": config.d_model, "heads": config.heads}
    if config.kv_heads is not None:
        sizes["kv_heads"] = config.kv_heads
    for field, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(problem(name, field, repr(size), "a whole number from 1 on"))
    if config.d_model % config.heads:
        accepted = f"numbers that divide d_model, {config.d_model}"
        raise ConfigError(problem(name, "heads", config.heads, accepted))
    if config.heads % (config.kv_heads or config.heads):
        accepted = f"numbers that divide heads, {config.heads}"
        raise ConfigError(problem(name, "kv_heads", config.kv_heads, accepted))
    if config.positions == "rotary" and config.d_model // config.heads % 2:
        accepted = "an even number for rotary positions"
        raise ConfigError(
            problem(name, "d_model / heads", config.d_model // config.heads, accepted)
        )
    if not isinstance(config.pad_vocab, bool):
        raise ConfigError(problem(name, "pad_vocab", repr(config.pad_vocab), "True or False"))
    if not 0 <= config.dropout < 1:
        raise ConfigError(problem(name, "dropout", config.dropout, "0 <= dropout < 1"))
    for field, accepted in choices.items():
        value = getattr(config, field, accepted[0])
        if value not in accepted:
            raise ConfigError(problem(name, field, repr(value), " or ".join(map(repr, accepted))))
