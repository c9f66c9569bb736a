"""The log-probability that a model gives a text."""

from typing import NamedTuple


class Scored(NamedTuple):
    """The tokens of a text as a model sees them, and their log-probabilities in nats.

    The mark that ends the text is the last token. Both lists are empty for what is no text.
    """

    pieces: list[str]
    logprobs: list[float]

    @property
    def score(self) -> float:
        """The log-probability of the text."""
        return sum(self.logprobs)

    @property
    def normalised(self) -> float:
        """The mean of the tokens' log-probabilities."""
        return self.score / max(1, len(self.logprobs))
