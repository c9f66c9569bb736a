"""Runs that learn to tell classes of images apart."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpuattn.data.class_names import ClassNames
from gpuattn.data.images import ImageBatch, ImageLoader, Images, read_images, shape_of
from gpuattn.data.labelled import some_of
from gpuattn.errors import ConfigError, DataError
from gpuattn.files import write_text
from gpuattn.parallel.dealing import ALONE, Dealing
from gpuattn.pretrained.origin import with_new_head
from gpuattn.pretrained.vit import resized
from gpuattn.tasks import store_cache
from gpuattn.tasks.prepared import Say
from gpuattn.tasks.task import Task
from gpuattn.tasks.texts import entropy
from gpuattn.tasks.users.classifier import Classifier, stored_side
from gpuattn.typing import StrPath

HELD_OUT, HELD_OUT_SHARE = 10_000, 10  # images without validation data, at most, one in so many
LEAST_BATCHES = 10  # batches of an epoch, at least, that the advice for small data aims at
SHOWN, KEPT = 4, 100  # wrong labels shown, and kept in a file, at each evaluation
EVALUATED = 512  # images that are read together
BATCH_UNIT = 8  # images that a batch is a multiple of


class ImageTask(Task):
    """Images with labels, and a classifier such as ViT, judged by its share of right labels.

    Batches are counted in images.
    """

    name, command = "images", "gpuattn classify"
    options = ("images", "valid_images", "shift", "flip", "mixup")
    chosen_by, argument, counted = ("images",), "images", "images"
    new_head = True
    new_user, predicted = Classifier, "image"
    smaller = "a smaller --image-size"
    rate_title = "Images per second"

    @staticmethod
    def new_corpus(config: Any, tokenizer: Any = None, say: Say = lambda text: None) -> Any:
        return ImageCorpus(config, tokenizer, say)

    def adapted(self, model: Any) -> Any:
        """Return a model for images of the run's size with a head for its classes: a new one where
        it has none, or that of other classes."""
        size, names, facts = self.config.image_size, self.corpus.tokenizer.names, self.corpus.facts
        if size != model.config.image:
            facts.append(f"positions are interpolated from images of {model.config.image} pixels")
            model = resized(model, size)
        if model.config.classes and self.corpus.classes_known:
            return model
        what = "other classes" if model.config.classes else "none"
        facts.append(f"the head is new, for {some_of(names)}: {self.config.origin} has {what}")
        return with_new_head(model, names, self.config.seed)

    @staticmethod
    def data_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
        """Images of an .npz say their size and channels, and a size which patches suit it."""
        shape = shape_of(values.get("images") or "")
        found: dict[str, Any] = {}
        if shape:
            found = {"image_size": min(shape[1:3]), "channels": shape[3]}
        size = values.get("image_size", found.get("image_size"))
        return found | ({"patch": suitable_patch(size)} if size else {})

    @staticmethod
    def check(config: Any) -> None:
        if not config.images:
            raise ConfigError(
                f"--model {config.model} learns from images: --images PATH, a folder with a folder "
                "for each class, or an .npz"
            )
        others = (config.task, config.source, config.target, config.pairs, config.lm)
        if any((*others, config.valid_source, config.valid_lm)):
            raise ConfigError(
                "--images PATH is all that a classifier of images learns from; accepted: it alone, "
                "or with --valid-images PATH"
            )

    @staticmethod
    def run_name(config: Any) -> str | None:
        return Path(config.images).resolve().name.split(".")[0]

    @staticmethod
    def describe_data(config: Any) -> str:
        return config.images

    @staticmethod
    def title(config: Any) -> str:
        return f"Classifier of {config.images}"

    @staticmethod
    def example(config: Any) -> str | None:
        return config.valid_images or config.images if shape_of(config.images) else None

    @staticmethod
    def scores(config: Any) -> tuple[str, dict[str, str]]:
        return "Held-out images", {"accuracy": "right, %"}

    @staticmethod
    def one_shape(config: Any) -> bool:
        return True

    @staticmethod
    def least_tokens(config: Any) -> int:
        return 1

    @staticmethod
    def describe_least(config: Any) -> str:
        return "one image"

    @staticmethod
    def unit(config: Any, most: int) -> int:
        return BATCH_UNIT

    @staticmethod
    def next_parts(config: Any, parts: int) -> int | None:
        return next((n for n in range(2 * parts, config.batch + 1) if config.batch % n == 0), None)

    @staticmethod
    def part_tokens(config: Any, parts: int) -> int:
        return config.batch // parts

    def describe_update(self) -> str:
        c = self.config
        tokens = f"{self.model.config.tokens:,} tokens each"
        return f"{c.batch * c.update_batches:,} images of {c.image_size} x {c.image_size}, {tokens}"

    def fixed_shape(self, batch: Any) -> Any:
        return batch  # its shape is that of all others

    def flops(self, batches: Sequence[Any]) -> float:
        images = sum(batch.target_tokens for batch in batches)
        return self.model.config.flops(np.full(images, self.model.config.tokens))

    def loss(self, batch: Any, label_smoothing: float = 0.0, dloss: Any = None) -> Any:
        return self.model.loss(
            batch.images, batch.labels, dloss, label_smoothing=label_smoothing, mix=batch.shares,
            pad=self.config.shift, flip=self.config.flip,
        )  # fmt: skip

    def prepare_evaluation(self) -> None:
        pass

    def answers(self, user: Any, deal: Dealing = ALONE) -> list[Any]:
        """Return the labels that the ``user`` gives to the held-out images of each batch."""

        def labels(batch):
            return [label.name for label in user.labels(batch.images)]

        return deal.each(self.corpus.valid_batches(), labels)

    def judge(
        self, answers: list[Any], folder: Path, update: int, loss: float
    ) -> tuple[dict[str, Any], list[str]]:
        written, names = [label for labels in answers for label in labels], self.corpus.valid_names
        wrong = [f"{a} taken for {b}" for a, b in zip(names, written, strict=True) if a != b]
        folder.mkdir(exist_ok=True)
        write_text(folder / f"update_{update:08d}.txt", "".join(f"{x}\n" for x in wrong[:KEPT]))
        accuracy = 100 * (1 - len(wrong) / len(names))
        return {"accuracy": accuracy, "score": accuracy}, wrong[:SHOWN]


def suitable_patch(size: int) -> int:
    """Return the side of patches for images of ``size``: about seven or more along a side."""
    most = min(16, max(2, int(size) // 7))
    return next(n for n in range(most, 0, -1) if int(size) % n == 0)


# ---- data ---------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """Images to learn from and images held out, which may be others of the same array."""

    train: Images
    rows: np.ndarray
    held: Images
    held_rows: np.ndarray


def _read_cached(path, side, channels, say=lambda text: None, **options):
    """Return ``read_images`` of a path; what is decoded is kept, see ``store_cache``."""
    found = read_images(path, side, channels, store_cache.image_folder(), say=say, **options)
    if Path(path).is_dir():
        kept = Path(found.images.filename)
        store_cache.mark_used(kept)
        store_cache.prune(kept, say)
    return found


def _read(config, path, names=None, say=lambda text: None):
    """Return the Images of a path, in the size that a config sees."""
    size = config.image_size
    side = stored_side(size) if Path(path).is_dir() else size
    return _read_cached(path, side, config.channels, say, names=names)


def _parts(config, names=None, say=lambda text: None):
    """Return the _Parts of a config; ``names``: of the run's classes, or None."""
    train = _read(config, config.images, names, say)
    every = np.arange(len(train.labels))
    if config.valid_images:
        held = _read(config, config.valid_images, train.names, say)
        return _Parts(train, every, held, np.arange(len(held.labels)))
    if len(every) < 2:
        raise DataError(
            f"{config.images} has one image; accepted: two or more, or give --valid-images"
        )
    order = np.random.Generator(np.random.Philox([config.seed, 1])).permutation(every)
    count = min(HELD_OUT, max(1, len(every) // HELD_OUT_SHARE))
    return _Parts(train, np.sort(order[count:]), train, np.sort(order[:count]))


def held_out_images(classifier: Classifier, path: StrPath | None = None) -> ImageLoader:
    """Return an ImageLoader of the images of a folder or .npz, or of those its run holds out.

    Raises DataError for images that cannot be used, such as those of a class unseen in training.
    """
    names, sizes = classifier.tokenizer.names, classifier.model.config
    if path:
        squares, channels = classifier.side, sizes.channels
        side = squares if Path(path).is_dir() else sizes.image
        whole = classifier.config is None
        held = _read_cached(path, side, channels, names=names, whole=whole)
        rows = np.arange(len(held.labels))
    else:
        _, _, held, rows = _parts(classifier.config, names)
    return ImageLoader(held.images, held.labels, rows, EVALUATED, 0)


class ImageCorpus:
    """Training batches by epoch and those held out, as ``tasks.corpus.Corpus`` has them.

    ``tokenizer``: the ClassNames of the run or of the folder that it begins with.
    ``classes_known``: whether those of the images are among them; of a folder they need not be.
    Raises DataError for images that cannot be used.
    """

    store = None  # of tokens

    def __init__(
        self, config: Any, tokenizer: ClassNames | None = None, say: Say = lambda text: None
    ) -> None:
        names = tokenizer.names if tokenizer else None
        self.classes_known = True
        if names and config.origin:  # the images may be of other classes than the folder's
            found = _read(config, config.images, None, say).names
            self.classes_known = set(found) <= set(names)
            names = names if self.classes_known else found
        self._data = data = _parts(config, names, say)
        self.tokenizer = ClassNames(data.train.names)
        self.fingerprint = int(data.train.digest[:8], 16)
        self.digests = {"images": data.train.digest}
        if config.valid_images:
            self.digests["valid_images"] = data.held.digest
        self.rebatch(config)
        counts = np.bincount(data.train.labels[data.rows], minlength=len(self.tokenizer))
        height, width = data.train.images.shape[1:3]
        guess = entropy(data.held.labels[data.held_rows])
        self.facts = [
            f"{config.images}: {len(data.rows):,} images of {height} x {width}, "
            f"{int(counts.min()):,} to {int(counts.max()):,} of a class",
            f"{len(data.held_rows):,} images for validation, loss of guessing by frequency "
            f"{guess:.2f}",
        ]
        self.warnings = []
        if len(data.rows) < LEAST_BATCHES * config.batch:
            fewer = max(1, len(data.rows) // LEAST_BATCHES)
            text = f"an epoch has less than {LEAST_BATCHES} batches. Try --batch {fewer}"
            self.warnings.append(text)

    def rebatch(self, config: Any) -> None:
        """Cut the same images into batches as another config says."""
        train, rows, held, held_rows = self._data
        self._train = ImageLoader(
            train.images, train.labels, rows, config.batch, config.seed, world=config.replicas,
            mixup=config.mixup,
        )  # fmt: skip
        self._held = ImageLoader(held.images, held.labels, held_rows, config.batch, 0)

    def epoch_tokens(self) -> int:
        """Return the images of an epoch."""
        return len(self._data.rows)

    def loader(self, epoch: int) -> ImageLoader:
        """Return the ImageLoader of every epoch."""
        return self._train

    def valid_batches(self) -> Iterator[ImageBatch]:
        """Yield the images held out, each once."""
        return self._held.all()

    @cached_property
    def valid_names(self) -> np.ndarray:
        """The names of the classes of the images held out, (N,)."""
        return np.array(self.tokenizer.names)[self._held.labels[self._held.rows]]
