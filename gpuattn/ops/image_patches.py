"""Patches of uint8 images as rows of a matrix, and the random changes that training makes to them.

A window of each image, at a random place and mirrored or not, is normalised and cut into squares:
Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021). Mixtures of two images: Zhang et al.,
"mixup: Beyond Empirical Risk Minimization" (2018). Device code: ``rawkernels/image_patches.cu``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuattn import arrays, rng
from gpuattn.arrays import check_together, ctype, get_xp
from gpuattn.autodiff.tape import op, raw
from gpuattn.cuda.kernels import kernel
from gpuattn.errors import problem
from gpuattn.impls import Call, Impl, Impls
from gpuattn.ops.arguments import check_flags, integer, take_arrays
from gpuattn.typing import Array, DType

BLOCK = 256
MAX_IMAGES = 65535  # blocks along the second axis
MAX_BYTES = 1 << 31  # of an image, and elements of its patches: they are counted in 32 bits
MAX_PLACES = 1 << 16  # of a window along an axis: a place is drawn from 16 bits


@op
def image_patches(
    images: Array,
    patch: int,
    *,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    pad: int = 0,
    flip: bool = False,
    seed: Any = None,
    mix: Array | None = None,
    before: int = 0,
    dtype: DType = np.float32,
    impl: str | None = None,
) -> Call[Array]:
    """Return the patches of a window of each image, (B, before + N, patch * patch * C).

    ``images``: uint8 (B, H, W, C), C 1 or 3. ``size``: of a window, in pixels: at most H and W, and
    a multiple of ``patch``; N = (size / patch)^2 patches, row by row. A patch is (patch, patch, C)
    in one row. ``mean``, ``std``: of each channel, by which pixels / 255 are normalised.
    ``seed``: an int or a ``rng.Key``: windows then lie anywhere in the image with ``pad`` black
    pixels around it, and half of them are mirrored with ``flip``. None: in the middle, as they are.
    ``mix``: (B,) float32, the share of image i, the rest being image B - 1 - i; None: all.
    ``before``: rows of zeros before the patches of an image, for a class token.
    ``dtype``: of the result: float32, float16 or bfloat16. There is no gradient.
    Raises TypeError for other dtypes, ValueError for what does not fit together.
    """
    name = "image_patches"
    images, mix = take_arrays(name, {"images": images}, {"mix": mix}).values()
    x, shares = raw(images), raw(mix)
    check_together(name, images=x, mix=shares)
    if x.dtype != np.uint8:
        raise TypeError(problem(name, "images.dtype", x.dtype, "uint8"))
    if x.ndim != 4 or x.shape[3] not in (1, 3):
        raise ValueError(problem(name, "images.shape", x.shape, "(B, H, W, 1) or (B, H, W, 3)"))
    count, height, width, channels = x.shape
    accepted = f"1 to {min(height, width)}, the smaller side of the images"
    size = integer(name, "size", size, accepted, 1, min(height, width))
    patch = integer(name, "patch", patch, f"a divisor of size, {size}", 1, size)
    if size % patch:
        raise ValueError(problem(name, "patch", patch, f"a divisor of size, {size}"))
    for argument, values in (("mean", mean), ("std", std)):
        if np.shape(values) != (channels,):
            got = f"{np.size(values)} numbers"
            raise ValueError(problem(name, argument, got, f"{channels}, one for each channel"))
    if not all(0 < value < np.inf for value in std):
        raise ValueError(problem(name, "std", tuple(std), "numbers above 0"))
    if shares is not None and (shares.shape, shares.dtype) != ((count,), np.float32):
        got = f"{shares.dtype} {shares.shape}"
        raise ValueError(problem(name, "mix", got, f"float32 ({count},)"))
    check_flags(name, flip=flip)
    dtype = np.dtype(dtype)
    if ctype(dtype) is None:
        raise TypeError(problem(name, "dtype", dtype, "float32, float16 or bfloat16"))
    most = (MAX_PLACES - max(height, width) + size - 1) // 2
    pad = integer(name, "pad", pad, f"0 to {most}", 0, most)
    return Call(
        IMPLS, (images, mix), impl, patch=patch, size=size, dtype=dtype, flip=bool(flip), pad=pad,
        before=integer(name, "before", before),
        scale=[1 / (255 * float(value)) for value in std],
        shift=[-float(a) / float(b) for a, b in zip(mean, std, strict=True)],
        key=None if seed is None else rng.as_key(seed),
    )  # fmt: skip


def _places(slack: int, pad: int, key: rng.Key | None) -> tuple[int, int]:
    """Return (the first place of a window, how many there are) along an axis with ``slack``."""
    return (slack // 2, 1) if key is None else (-pad, slack + 2 * pad + 1)


# ---- reference: NumPy or CuPy -------------------------------------------------------------------


def _forward_reference(
    images, mix, *, needs, patch, size, dtype, flip, pad, before, scale, shift, key
):  # fmt: skip
    xp, (count, height, width, channels) = get_xp(images), images.shape
    drawn = xp.zeros((count, rng.LANES), np.int64)
    if key is not None:
        drawn = rng.lanes(xp, key, 0, count * rng.LANES).reshape(count, rng.LANES).astype(np.int64)
    top, tops = _places(height - size, pad, key)
    left, lefts = _places(width - size, pad, key)
    along = xp.arange(size)
    rows = (top + (drawn[:, 0] * tops >> 16))[:, None] + along
    mirrored = (drawn[:, 2] < 32768) & flip & (key is not None)
    cols = (left + (drawn[:, 1] * lefts >> 16))[:, None]
    cols = cols + xp.where(mirrored[:, None], along[::-1], along)
    x = images[
        xp.arange(count)[:, None, None],
        rows.clip(0, height - 1)[:, :, None],
        cols.clip(0, width - 1)[:, None, :],
    ].astype(np.float32)
    seen = ((rows >= 0) & (rows < height))[:, :, None] & ((cols >= 0) & (cols < width))[:, None, :]
    x *= seen[..., None]
    if mix is not None:
        share = mix[:, None, None, None]
        x = share * x + (1 - share) * x[::-1]
    x *= xp.asarray(scale, np.float32)
    x += xp.asarray(shift, np.float32)
    across = size // patch
    x = x.reshape(count, across, patch, across, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    out = arrays.empty(images, (count, before + across**2, patch**2 * channels), dtype)
    out[:, :before] = 0
    out[:, before:] = x.reshape(count, across**2, -1)
    return out, None


# ---- raw: rawkernels/image_patches.cu -----------------------------------------------------------


def _refuse_raw(images, *_, patch, size, before, **__):
    if not arrays.on_gpu(images):
        return "images is a NumPy array; move it with gpuattn.to_gpu(images)"
    count, height, width, channels = images.shape
    if count > MAX_IMAGES:
        return f"there are {count} images, the kernel takes at most {MAX_IMAGES}"
    elements = (before + (size // patch) ** 2) * patch**2 * channels
    if max(elements, height * width * channels) >= MAX_BYTES:
        return f"images are {height} x {width}, the kernel takes less than {MAX_BYTES} numbers each"
    return None


def _forward_raw(images, mix, *, needs, patch, size, dtype, flip, pad, before, scale, shift, key):
    images = get_xp(images).ascontiguousarray(images)
    count, height, width, channels = images.shape
    rows, cols = before + (size // patch) ** 2, patch**2 * channels
    out = arrays.empty(images, (count, rows, cols), dtype)
    pack = next(n for n in (8, 4, 2, 1) if patch * channels % n == 0)
    cut = kernel(
        "image_patches.cu", "image_patches", scalar=ctype(dtype), PATCH=patch, CHANNELS=channels,
        PACK=pack, BLOCK=BLOCK,
    )  # fmt: skip
    shares = None if mix is None else get_xp(images).ascontiguousarray(mix)
    numbers = [*scale, *scale[:1] * (3 - channels), *shift, *shift[:1] * (3 - channels)]
    cut(
        (-(-rows * cols // (pack * BLOCK)), count), (BLOCK,), images, shares, out, height, width,
        size, before, *_places(height - size, pad, key), *_places(width - size, pad, key),
        flip and key is not None, *numbers, *rng.device_arguments(key or rng.Key(0)),
    )  # fmt: skip
    return out, None


IMPLS = Impls(
    "image_patches",
    Impl("raw-simt", _forward_raw, refuse=_refuse_raw),
    Impl("reference", _forward_reference),
)
