"""What the configurations of the models have in common."""

from gpuattn.errors import ConfigError, problem

ROWS = 64  # tables of the vocabulary have a multiple of so many rows: products are faster
CHOICES = {
    "norm": ("pre", "post"),
    "positions": ("sinusoidal", "learned"),
    "activation": ("relu", "gelu"),
}
# What is computed again in the backward pass to save memory: nothing; layers, of which only the
# inputs are kept; with "full", no more than a slice of the logits exists at a time, too.
CHECKPOINT = ("none", "block", "full")


def padded_rows(vocab):
    """Return how many rows a table for ``vocab`` tokens has."""
    return -(-vocab // ROWS) * ROWS


def check_config(config, **sizes):
    """Raise ConfigError unless sizes are positive, heads divide the width and choices are known.

    ``config``: a dataclass with ``d_model``, ``heads``, ``dropout`` and any of CHOICES.
    """
    name = type(config).__name__
    for field, size in {"d_model": config.d_model, "heads": config.heads, **sizes}.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(problem(name, field, repr(size), "a whole number from 1 on"))
    if config.d_model % config.heads:
        accepted = f"numbers that divide d_model, {config.d_model}"
        raise ConfigError(problem(name, "heads", config.heads, accepted))
    if not 0 <= config.dropout < 1:
        raise ConfigError(problem(name, "dropout", config.dropout, "0 <= dropout < 1"))
    for field, accepted in CHOICES.items():
        value = getattr(config, field, accepted[0])
        if value not in accepted:
            raise ConfigError(problem(name, field, repr(value), " or ".join(map(repr, accepted))))
