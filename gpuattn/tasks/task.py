"""What differs between kinds of training: the data, the loss, how batches are cut and judged."""

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gpuattn.models.kinds import new_model
from gpuattn.parallel.dealing import ALONE, Dealing

# options that name data: files, and folders of stores
DATA_FILES = (
    "source", "target", "pairs", "valid_source", "valid_target", "lm", "valid_lm", "images",
    "valid_images", "classify", "valid_classify",
)  # fmt: skip
OF_TEXT = "vocab_size", "pad_vocab", "kv_heads"  # options that all tasks of texts have
LINE_UNIT = 512  # tokens that a batch of lines is a multiple of, where it is chosen to fit
MOST_BEAMS = 200  # a wider search takes memory and translates no better


class Task(abc.ABC):
    """The data of a run, its model, and how it is judged.

    ``corpus``: has ``loader(epoch)``, ``valid_batches()``, ``tokenizer``, ``store`` (a TokenStore
    or None), ``facts`` (sentences on what was read), ``warnings``, ``digests`` and ``fingerprint``.
    ``model``: the Module that is trained.
    ``user``: what a trained model is used with. ``tokenizer``: the run's, or None to make one.
    ``say`` is given sentences while data are prepared. ``model``: to train, or None for a new one.

    What is static is asked of a TrainConfig, ``config``, before there are data.
    """

    name: ClassVar[str]  # as ``models.kinds.ModelKind.tasks`` have it
    options: ClassVar[tuple[str, ...]]  # fields of a TrainConfig that other tasks do not have
    chosen_by: ClassVar[tuple[str, ...]] = ()  # fields that choose the task where no model is given
    argument: ClassVar[str | None] = None  # field that one path on the command line gives
    new_head: ClassVar[bool] = False  # whether a model gets one that it lacks, see ``adapted``
    predicted: ClassVar[str] = "target token"  # what a loss is the mean of
    counted: ClassVar[str] = "tokens"  # what batches and rates count
    command: ClassVar[str]  # of the shell: uses a trained model
    smaller: ClassVar[str]  # what to try for a smaller batch than the smallest
    rate_title: ClassVar[str]  # of the chart of tokens per second
    new_corpus: ClassVar[Callable[..., Any]]  # (config, tokenizer or None, say)
    new_user: ClassVar[Any]  # a class: (config, model, tokenizer, metrics=None), with its ``task``

    def __init__(
        self, config: Any, tokenizer: Any = None, say: Callable[[str], None] = lambda text: None,
        model: Any = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.corpus = self.new_corpus(config, tokenizer, say)
        self.model = self.adapted(model) if model else new_model(config, self.corpus.tokenizer)
        self.user = self.new_user(config, self.model, self.corpus.tokenizer)
        self.model.checkpoint = config.checkpoint

    def adapted(self, model: Any) -> Any:
        """Return the model that is trained, from one that is given."""
        return model

    def rebatch(self, config: Any) -> None:
        """Continue with the batch sizes of another config, which is otherwise the same."""
        self.config = config
        self.corpus.rebatch(config)

    # ---- options of a run ----

    @staticmethod
    def default_data(given: Collection[str]) -> dict[str, Any]:
        """Return {field: value} of the data that a run has to which none of its fields is given."""
        return {}

    @staticmethod
    def data_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
        """Return {field: value} that suit the data that ``values``, {field: value}, name."""
        return {}

    @staticmethod
    @abc.abstractmethod
    def check(config: Any) -> None:
        """Raise ConfigError for data, or limits on them, that do not go together."""

    @staticmethod
    @abc.abstractmethod
    def run_name(config: Any) -> str | None:
        """Return the name of the folder that a run has by default, if its data have a name."""

    @staticmethod
    @abc.abstractmethod
    def describe_data(config: Any) -> str:
        """Return what a run learns from, in words."""

    @staticmethod
    @abc.abstractmethod
    def title(config: Any) -> str:
        """Return the title of a run's report."""

    @staticmethod
    @abc.abstractmethod
    def example(config: Any) -> str | None:
        """Return a line to pipe into ``command``; None where it needs none."""

    @staticmethod
    @abc.abstractmethod
    def scores(config: Any) -> tuple[str, dict[str, str]]:
        """Return (title, {figure of ``evaluate``: its name in words}) of the curves to draw."""

    # ---- sizes of batches ----

    @staticmethod
    @abc.abstractmethod
    def one_shape(config: Any) -> bool:
        """Return whether all batches have the same shape."""

    @staticmethod
    @abc.abstractmethod
    def least_tokens(config: Any) -> int:
        """Return the tokens of the smallest batch that a run can have."""

    @staticmethod
    @abc.abstractmethod
    def describe_least(config: Any) -> str:
        """Return the tokens of a batch that cannot be cut further, in words."""

    @staticmethod
    @abc.abstractmethod
    def unit(config: Any, most: int) -> int:
        """Return what batches are a multiple of, in tokens, where they have up to ``most``."""

    @staticmethod
    @abc.abstractmethod
    def next_parts(config: Any, parts: int) -> int | None:
        """Return into how many parts a batch is cut next, at least ``2 * parts``; None: no more."""

    @staticmethod
    @abc.abstractmethod
    def part_tokens(config: Any, parts: int) -> int:
        """Return the tokens of a batch that is one of so many parts."""

    # ---- a step ----

    def describe_model(self) -> str:
        """Return how large the model is, in words."""
        return f"{self.config.layers[0]} layers, width {self.config.dim}"

    @abc.abstractmethod
    def describe_update(self) -> str:
        """Return how much an update takes, in words."""

    @abc.abstractmethod
    def fixed_shape(self, batch: Any) -> Any:
        """Return a batch with the same content in one of few shapes, for CUDA graphs."""

    @abc.abstractmethod
    def flops(self, batches: Sequence[Any]) -> float:
        """Return the model FLOPs of steps on batches of the corpus, see ``models.flops``."""

    @abc.abstractmethod
    def loss(self, batch: Any, label_smoothing: float = 0.0, dloss: Any = None) -> Any:
        """Return the mean loss per target token of a batch on the model's device, as a Tensor.

        ``dloss``: what backward will be called with, see ``ops.loss.cross_entropy``.
        """

    @abc.abstractmethod
    def prepare_evaluation(self) -> None:
        """Prepare what evaluations need besides the model, so that the first one finds it."""

    @abc.abstractmethod
    def answers(self, user: Any, deal: Dealing = ALONE) -> list[Any]:
        """Return what a ``user`` of a model answers to what is held out, for ``judge``.

        All ranks of a Dealing call this, and it deals the work out among them.
        """

    @abc.abstractmethod
    def judge(
        self, answers: list[Any], folder: Path, update: int, loss: float
    ) -> tuple[dict[str, Any], list[str]]:
        """Return (figures, texts to show) of the answers to all that is held out.

        Figures go into the row of metrics, ``score`` among them: the more the better. ``folder``:
        where what the model wrote is kept. ``loss``: that of the validation batches.
        """


class LineTask(Task):
    """Lines of text of up to ``block`` tokens, packed without padding, and an encoder."""

    smaller = "a smaller --block"
    rate_title = "Tokens per second"

    @staticmethod
    def one_shape(config: Any) -> bool:
        return False

    @staticmethod
    def least_tokens(config: Any) -> int:
        return config.block

    @staticmethod
    def describe_least(config: Any) -> str:
        return f"{config.batch:,}"

    @staticmethod
    def unit(config: Any, most: int) -> int:
        return LINE_UNIT

    @staticmethod
    def next_parts(config: Any, parts: int) -> int | None:
        return 2 * parts if config.batch // (2 * parts) >= config.block else None

    @staticmethod
    def part_tokens(config: Any, parts: int) -> int:
        return config.batch // parts

    def flops(self, batches: Sequence[Any]) -> float:
        return self.model.config.flops(np.concatenate([batch.lengths for batch in batches]))

    def prepare_evaluation(self) -> None:
        pass
