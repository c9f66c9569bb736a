"""Images with labels: folders of classes and .npz files as arrays, and their batches.

The images of a folder are decoded once, into an array on the disk, and an .npz that is not
compressed is read by memory map: what a batch holds is in memory.
"""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpuattn.data.pictures import is_picture, read_picture
from gpuattn.environment import usable_cores
from gpuattn.errors import DataError
from gpuattn.typing import Array, StrPath

MOST_COMPRESSED = 2 << 30  # bytes of a compressed array, which is read into memory
AT_ONCE = 256  # images of a folder that are decoded together
SHOWN = 5  # faults of a folder that an error tells
Say = Callable[[str], None]


class Images(NamedTuple):
    """``images``: uint8 (N, H, W, C), perhaps on the disk. ``labels``: int32 (N,), the numbers of
    ``names``. ``digest``: of the files that they came from, in hexadecimal."""

    images: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]
    digest: str


def read_images(
    path: StrPath, side: int, channels: int, cache: Path, *, whole: bool = False,
    names: Sequence[str] | None = None, say: Say = lambda text: None,
) -> Images:  # fmt: skip
    """Return the Images of a folder with a folder for each class, or of an .npz.

    An .npz has ``images``, uint8 (N, H, W) or (N, H, W, C), and ``labels`` (N,), whole numbers or
    strings. Files of a folder become squares of ``side`` pixels; those of a class may lie in
    folders inside its own. ``whole``: as in ``read_picture``. ``cache``: the folder for the array
    that is made of them.
    ``names``: of the classes there may be; None: those found, in order. ``say`` is given a sentence
    while files are decoded. Raises DataError that names what cannot be used, UnsupportedError for
    image files without Pillow.
    """
    path = Path(path)
    if path.is_dir():
        return _of_folder(path, (side, channels, whole), cache, names, say)
    found = _of_npz(path, names)
    height, width, there = found.images.shape[1:]
    if there != channels or min(height, width) < side:
        kinds = {1: "1 (gray)", 3: "3"}
        raise DataError(
            f"{path} has images of {height} x {width} pixels with {kinds.get(there, there)} "
            f"channels; accepted: at least {side} on a side, with {kinds[channels]} "
            "(--image-size, --channels)"
        )
    return found


def shape_of(path: StrPath) -> tuple[int, ...] | None:
    """Return the shape (N, H, W, C) of the images in an .npz; None for anything else."""
    try:
        with zipfile.ZipFile(path) as file:
            shape = _with_channels(_header(file, "images")[0])
            return shape if len(shape) == 4 else None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def squares_of(path: StrPath) -> np.ndarray:
    """Return the images of an .npz, uint8 (N, H, W, C). Raises DataError as ``read_images``."""
    path = Path(path)
    return _opened(path, lambda file: _images(path, file))


# ---- an .npz ------------------------------------------------------------------------------------


def _of_npz(path, names):
    def read(file):
        crcs = sorted((one.filename, one.CRC, one.file_size) for one in file.infolist())
        return _images(path, file), _array(path, file, "labels"), crcs

    images, labels, crcs = _opened(path, read)
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iuUS" or not len(labels):
        raise DataError(
            f"{path}: labels is {labels.dtype} {labels.shape}; accepted: whole numbers or strings, "
            f"one for each of {len(images):,} images"
        )
    kinds, numbers = np.unique(labels, return_inverse=True)
    found = [kind.decode() if isinstance(kind, bytes) else str(kind) for kind in kinds.tolist()]
    digest = hashlib.sha256(repr(crcs).encode()).hexdigest()
    return Images(images, *_numbered(path, numbers, found, names), digest)


def _opened(path, read):
    """Return ``read(file)`` of an .npz; DataError for what is none."""
    try:
        with zipfile.ZipFile(path) as file:
            return read(file)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        raise DataError(f"{path}: {error.args[0]}; accepted: images and labels") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is no .npz of arrays: {error}") from error


def _images(path, file):
    images = _array(path, file, "images")
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(
            f"{path}: images is {images.dtype} {images.shape}; accepted: uint8 (N, H, W) or "
            "(N, H, W, C)"
        )
    return images.reshape(_with_channels(images.shape))


def _with_channels(shape):
    return tuple(shape) if len(shape) != 3 else (*shape, 1)


def _array(path, file, name):
    """Return an array of an .npz: as a memory map, or read where it is compressed."""
    shape, fortran, dtype, begin, member = _header(file, name)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are not read")
    if member.compress_type == zipfile.ZIP_STORED and prod(shape):
        return np.memmap(path, dtype, "r", begin, shape, "F" if fortran else "C")
    if member.file_size > MOST_COMPRESSED:
        raise DataError(
            f"{path}: {name} takes {member.file_size / 1e9:.1f} GB and is compressed; accepted: up "
            f"to {MOST_COMPRESSED / 1e9:.1f} GB. Save it with numpy.savez, which is not held in "
            "memory"
        )
    with file.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _header(file, name):
    """Return (shape, whether in Fortran's order, dtype, first byte in the file, member)."""
    member = file.getinfo(f"{name}.npy")
    with file.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read[version[0]](stream)
        inside = stream.tell()
    file.fp.seek(member.header_offset + 26)  # where the local header has two lengths
    lengths = file.fp.read(4)
    before = 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return shape, fortran, dtype, member.header_offset + before + inside, member


def _numbered(path, numbers, found, names):
    """Return int32 labels by ``names`` and these, for ``numbers`` of the names ``found``."""
    if names is None:
        return numbers.astype(np.int32), tuple(found)
    known = {name: number for number, name in enumerate(names)}
    unseen = [name for name in found if name not in known]
    if unseen:
        raise DataError(
            f"{path} has {_some(map(repr, unseen))} among its labels, unseen in training; "
            f"accepted: {_some(map(repr, names))}"
        )
    places = np.array([known[name] for name in found], np.int32)
    return places[numbers], tuple(names)


def _some(texts):
    """Return the first SHOWN of some texts as one."""
    texts = list(texts)
    more = f" and {len(texts) - SHOWN:,} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


# ---- a folder of classes ------------------------------------------------------------------------


def _of_folder(folder, form, cache, names, say):
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    files = [sorted(path for path in one.rglob("*") if is_picture(path)) for one in classes]
    empty = [one.name for one, some in zip(classes, files, strict=True) if not some]
    if not classes or empty:
        what = f"no images in {_some(empty)}" if classes else "no folders in it"
        raise DataError(f"{folder} has {what}; accepted: a folder with images for each class")
    numbers = np.repeat(np.arange(len(classes)), list(map(len, files)))
    labels, kinds = _numbered(folder, numbers, [one.name for one in classes], names)
    paths = [path for some in files for path in some]
    known = [(path.relative_to(folder).as_posix(), path.stat()) for path in paths]
    digest = hashlib.sha256(repr([(name, it.st_size) for name, it in known]).encode()).hexdigest()
    key = repr([str(folder.resolve()), form, [it.st_mtime_ns for _, it in known]])
    kept = cache / f"images-{hashlib.sha256((key + digest).encode()).hexdigest()[:32]}.npy"
    if not kept.exists():
        say(f"{folder}: {len(paths):,} images are decoded once, and kept in {kept}")
        _decode(paths, form, kept)
    return Images(np.load(kept, mmap_mode="r"), labels, kinds, digest)


def _decode(paths, form, target):
    """Write the images of files as one array. DataError that names all files with faults."""
    side, channels, whole = form
    faults: list[str] = []

    def read(path):
        try:
            return read_picture(path, side, channels, whole=whole)
        except DataError as error:
            faults.append(str(error))
            return None

    part = target.with_name(f".{target.name}-{os.getpid()}.tmp")
    head = {"shape": (len(paths), side, side, channels), "fortran_order": False, "descr": "|u1"}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file, ThreadPoolExecutor(usable_cores()) as pool:
            np.lib.format.write_array_header_1_0(file, head)
            for begin in range(0, len(paths), AT_ONCE):
                decoded = list(pool.map(read, paths[begin : begin + AT_ONCE]))
                if not faults:
                    file.write(np.stack(decoded).tobytes())
        if faults:
            raise DataError(
                f"{len(faults):,} of {len(paths):,} images cannot be used: "
                f"{'; '.join(sorted(faults)[:SHOWN])}. Remove them, or put them right"
            )
        os.replace(part, target)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot write {target}: {reason}. Set GPUATTN_CACHE_DIR") from error
    finally:
        part.unlink(missing_ok=True)


# ---- batches ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageBatch:
    """B images: ``pixels``, int32, whose bytes are those of uint8 ``shape`` = (B, H, W, C);
    ``labels`` (B,) int32; ``mix``, (B,) float32 or None: the share of each image beside the one in
    the mirrored place, see ``ops.image_patches``. Arrays of a DeviceFeed are int32 throughout.
    """

    pixels: Array
    labels: Array
    mix: Array | None
    shape: tuple[int, int, int, int]

    @property
    def limits(self) -> tuple[int, ...]:
        """What a step depends on besides the shapes of the arrays."""
        return self.shape

    @property
    def target_tokens(self) -> int:
        """The images: what a run counts."""
        return self.shape[0]

    all_tokens = target_tokens

    @property
    def images(self) -> Array:
        """The images, uint8 (B, H, W, C), a view."""
        return self.pixels.view(np.uint8)[: prod(self.shape)].reshape(self.shape)

    @property
    def shares(self) -> Array | None:
        """``mix`` as float32."""
        return None if self.mix is None else self.mix.view(np.float32)


class ImageLoader:
    """Epochs of batches of images in random order.

    ``images``: uint8 (N, H, W, C); of a memory map only what a batch holds is read. ``rows``: the
    numbers of those to use. ``batch``: B, images of this rank. An epoch has each image at most
    once; those that fill no batch are left to other epochs. Of fewer than a batch some come twice.
    ``mixup``: the alpha of the Beta distribution that shares are drawn from; 0: none.
    """

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, rows: np.ndarray, batch: int, seed: int,
        *, rank: int = 0, world: int = 1, mixup: float = 0.0,
    ) -> None:  # fmt: skip
        self.images, self.labels, self.rows = images, labels, rows
        self.batch, self.seed, self.mixup = batch, seed, mixup
        self.rank, self.world = rank, world

    def batches(self, number: int) -> int:
        """Return how many batches each rank has in an epoch."""
        return max(1, len(self.rows) // (self.batch * self.world))

    def epoch(self, number: int, start: int = 0) -> Iterator[ImageBatch]:
        """Yield this rank's batches of an epoch, from its batch ``start`` on."""
        rng = np.random.Generator(np.random.Philox([self.seed, number]))
        count, size = self.batches(number), self.batch * self.world
        order = np.resize(rng.permutation(len(self.rows)), count * size)
        for i in range(start, count):
            chosen = order[i * size + self.rank * self.batch :][: self.batch]
            mix = None
            if self.mixup:
                drawn = np.random.Generator(np.random.Philox([self.seed, number, i, self.rank]))
                mix = drawn.beta(self.mixup, self.mixup, self.batch).astype(np.float32)
            yield self._batch(self.rows[chosen], mix)

    def all(self) -> Iterator[ImageBatch]:
        """Yield all images once, in order; the last batch may be smaller."""
        for begin in range(0, len(self.rows), self.batch):
            yield self._batch(self.rows[begin : begin + self.batch], None)

    def _batch(self, rows, mix):
        shape = len(rows), *self.images.shape[1:]
        pixels = np.zeros(-(-prod(shape) // 4), np.int32)
        batch = ImageBatch(pixels, self.labels[rows], mix, shape)
        np.take(self.images, rows, 0, out=batch.images, mode="clip")  # "raise" copies twice
        return batch
