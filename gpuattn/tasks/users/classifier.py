"""Labels of images by a classifier such as ViT, and of texts by one such as Bert."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuattn.arrays import get_xp, on_gpu, to_cpu
from gpuattn.autodiff.tape import raw
from gpuattn.data.class_names import LabelledTokenizer
from gpuattn.data.images import squares_of
from gpuattn.data.labelled import LabelLoader
from gpuattn.data.pictures import read_picture
from gpuattn.errors import DataError, problem
from gpuattn.ops.softmax import softmax
from gpuattn.runtime.device import batch_to
from gpuattn.typing import Array, StrPath

BATCH = {"cpu": 64, "gpu": 512}  # images that are computed together
TOKENS = {"cpu": 1 << 11, "gpu": 1 << 16}  # of texts, likewise


class Label(NamedTuple):
    """The most probable class of an image or a text, and its probability."""

    name: str
    probability: float


def stored_side(size: int) -> int:
    """Return the side of the squares that image files become, of which ``size`` is the middle."""
    return size * 8 // 7


class Classifier:
    """Labels images. The arguments are those of a Sampler; ``tokenizer``: a ClassNames.

    ``config`` None, of a folder of Hugging Face: whole image files are squeezed into a square, as
    transformers does.
    """

    task = "images"
    by_line = {"classify_each": ()}  # what ranks share, see ``dealt``

    def __init__(
        self, config: Any, model: Any, tokenizer: Any, metrics: Mapping[str, Any] | None = None
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.metrics = metrics or {}

    def classify(self, path: StrPath) -> list[Label]:
        """Return the Label of an image file, or of each image of an .npz.

        Raises DataError for a file that cannot be used, UnsupportedError for images without Pillow.
        """
        if Path(path).suffix != ".npz":
            return self.labels(self.read(path)[None])
        images = squares_of(path)
        (height, width, there), c = images.shape[1:], self.model.config
        if there != c.channels or min(height, width) < c.image:
            accepted = f"at least {c.image} x {c.image} with {c.channels} channels"
            got = f"of {height} x {width} pixels with {there} channels"
            raise DataError(problem("classify", f"{path}: images", got, accepted))
        return self.labels(images)

    def classify_each(self, paths: Sequence[StrPath]) -> list[list[Label] | DataError]:
        """Return for each file what ``classify`` does, or the error that it raises."""

        def labels(path):
            try:
                return self.classify(path)
            except DataError as error:
                return error

        return list(map(labels, paths))

    def read(self, path: StrPath) -> np.ndarray:
        """Return an image file as the model has seen others, uint8 (H, W, C)."""
        channels = self.model.config.channels
        return read_picture(path, self.side, channels, whole=self.config is None)

    @property
    def side(self) -> int:
        """The side of the squares that image files become."""
        size = self.model.config.image
        return size if self.config is None else stored_side(size)

    def labels(self, images: np.ndarray) -> list[Label]:
        """Return the Label of each of uint8 images (N, H, W, C)."""
        found: list[Label] = []
        for probabilities in self.probabilities(images):
            best = probabilities.argmax(1)
            most = probabilities[np.arange(len(best)), best]
            names = map(self.tokenizer.piece, best.tolist())
            found += map(Label, names, most.tolist())
        return found

    def probabilities(self, images: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the probabilities, float32 (n, classes), of some images after the other."""
        weight = self.model.parameters()[0].data
        size = BATCH["gpu" if on_gpu(weight) else "cpu"]
        for begin in range(0, len(images), size):
            part: Array = get_xp(weight).asarray(np.ascontiguousarray(images[begin : begin + size]))
            with self.model.evaluating():
                logits = raw(self.model.logits(part)).astype(np.float32)
            yield to_cpu(raw(softmax(logits)))


class TextClassifier:
    """Labels lines. The arguments are those of a Sampler; ``config`` may be None."""

    task = "labels"
    by_line = {"classify": ()}  # what ranks share, see ``dealt``

    def __init__(
        self, config: Any, model: Any, tokenizer: LabelledTokenizer,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.metrics = metrics or {}

    def classify(self, lines: Sequence[str], *, truncate: bool = False) -> list[Label]:
        """Return the Label of each line: its most probable class, and the probability.

        ``truncate``: cut a longer line than the model takes, which else is a DataError.
        """
        if isinstance(lines, str):
            raise TypeError(problem("classify", "lines", "a str", "a list of str, a line each"))
        found = self.probabilities([self.check(line, truncate) for line in lines])
        best = found.argmax(1)
        names = (self.tokenizer.names[i] for i in best)
        return list(map(Label, names, found[np.arange(len(best)), best].tolist()))

    def check(self, line: str, truncate: bool = False) -> list[int]:
        """Return the token ids of a line, with its marks. DataError: see ``classify``."""
        (ids,), most = self.tokenizer.encode_marked([line.strip()]), self.model.config.max_length
        if not ids:
            accepted = "a text with tokens"
            raise DataError(problem("classify", "the line", "without a token", accepted))
        if len(ids) > most and not truncate:
            got, accepted = f"{len(ids)} tokens long", f"up to {most}"
            advice = "truncate=True (--truncate) cuts it"
            raise DataError(problem("classify", "the line", got, accepted, advice))
        return cut(ids, most)

    def probabilities(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the probabilities, float32 (texts, classes), of token ids of texts."""
        found = np.zeros((len(ids), len(self.tokenizer.names)), np.float32)
        for batch in self.batches(ids):
            found[batch.sentences] = self.of_batch(batch)
        return found

    def batches(self, ids: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Yield the LabelBatches that token ids of texts are computed in; their labels are 0."""
        if len(ids):
            room = TOKENS["gpu" if on_gpu(self.model.parameters()[0].data) else "cpu"]
            yield from LabelLoader(ids, np.zeros(len(ids)), max(room, *map(len, ids)), 0).epoch(0)

    def of_batch(self, batch: Any) -> np.ndarray:
        """Return the probabilities, float32 (B, classes), of the texts of a LabelBatch."""
        batch = replace(batch, order=None)  # which gradients need
        batch = batch_to(batch, get_xp(self.model.parameters()[0].data))
        with self.model.evaluating():
            logits = raw(self.model.class_logits(batch.tokens, batch.rows, **batch.packing))
            return to_cpu(raw(softmax(logits.astype(np.float32))))


def cut(ids: Sequence[int], most: int) -> list[int]:
    """Return the ids of a text, of which up to ``most``: the first ones, and the last."""
    return list(ids) if len(ids) <= most else [*ids[: most - 1], ids[-1]]
