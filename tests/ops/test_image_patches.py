import emulator
import numpy as np
import pytest
from checks import DTYPES, dtype_of, find, implementations, module_named

from gpuattn import explain, rng
from gpuattn.arrays import to_cpu
from gpuattn.ops import image_patches as module
from gpuattn.ops.image_patches import IMPLS, image_patches
from gpuattn.rng import Key

HERE = implementations(IMPLS)
KEY = Key(0x123456789ABCDEF0, 3, 7)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CASES = {  # shape, options
    "in the middle": ((3, 21, 30, 3), {"patch": 4, "size": 16}),
    "a window anywhere": ((5, 9, 12, 1), {"patch": 2, "size": 8, "seed": KEY, "flip": True}),
    "padded": ((7, 14, 14, 3), {
        "patch": 7, "size": 14, "seed": KEY, "pad": 5, "flip": True, "before": 1,
    }),
    "mixed": ((4, 20, 18, 3), {
        "patch": 16, "size": 16, "seed": KEY, "pad": 1, "mix": True, "before": 2,
    }),
    "one image, one pixel": ((1, 1, 1, 1), {"patch": 1, "size": 1, "seed": KEY, "mix": True}),
}  # fmt: skip


def problem(shape, xp=np, **options):
    """Return (images, options) of a case."""
    random, channels = np.random.default_rng(1), shape[3]
    images = random.integers(0, 256, shape, np.uint8)
    if options.pop("mix", False):
        options["mix"] = xp.asarray(random.random(shape[0], np.float32))
    return xp.asarray(images), options | {"mean": MEAN[:channels], "std": STD[:channels]}


def formula(
    images, *, patch, size, mean, std, seed=None, pad=0, flip=False, mix=None, before=0,
):  # fmt: skip
    """Return the patches in float64, pixel by pixel."""
    windows = []
    for i, image in enumerate(images):
        padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0))) if seed else image
        room = [n - size for n in padded.shape[:2]]
        places, mirrored = [n // 2 for n in room], False
        if seed:
            drawn = rng.lanes(np, seed, 8 * i, 8).tolist()
            places = [n * (most + 1) >> 16 for n, most in zip(drawn, room, strict=False)]
            mirrored = flip and drawn[2] < 32768
        rows, cols = (slice(begin, begin + size) for begin in places)
        window = padded[rows, cols].astype(np.float64)
        windows.append(window[:, ::-1] if mirrored else window)
    x = np.stack(windows)
    if mix is not None:
        share = mix.astype(np.float64)[:, None, None, None]
        x = share * x + (1 - share) * x[::-1]
    x = (x / 255 - mean) / std
    across = range(0, size, patch)
    cut = [x[:, a : a + patch, b : b + patch].reshape(len(x), -1) for a in across for b in across]
    return np.concatenate([np.zeros((len(x), before, cut[0].shape[1])), np.stack(cut, 1)], 1)


def check(found, images, options, dtype):
    want = formula(np.asarray(to_cpu(images)), **{n: to_cpu(v) if n == "mix" else v
                                                  for n, v in options.items()})  # fmt: skip
    found = to_cpu(found)
    assert found.dtype == dtype_of(dtype) and found.shape == want.shape
    eps = {"float32": 2e-6, "float16": 5e-4, "bfloat16": 4e-3}[dtype]
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=eps, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name, where", HERE)
def test_patches_are_those_of_the_formula(name, where, shape, options, dtype):
    images, options = problem(shape, module_named(where), **options)
    found = image_patches(images, **options, dtype=dtype_of(dtype), impl=name)
    check(found, images, options, dtype)


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("dtype, case", list(zip([*DTYPES, "float32"], CASES, strict=False)))
def test_the_kernel_emulated(monkeypatch, dtype, case):
    monkeypatch.setattr(module, "kernel", emulator.Machine(seed=1).kernel)
    shape, options = CASES[case]
    images, options = problem(shape, **options)
    call = image_patches.prepare(images, **options, dtype=dtype_of(dtype))
    found, _ = find(IMPLS, "raw-simt").forward(*call.inputs, needs=(), **call.params)
    check(found, images, options, dtype)


def test_windows_differ_by_image_step_and_seed_and_halves_are_mirrored():
    images = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None], (400, 1, 64, 1))
    wide = {"patch": 1, "size": 1, "mean": (0,), "std": (1 / 255,)}
    places = image_patches(images, **wide, seed=KEY).ravel().round()
    assert set(places) == set(range(64))
    assert (places != image_patches(images, **wide, seed=KEY._replace(step=8)).ravel()).mean() > 0.9
    pair = np.broadcast_to(np.array([[0, 1]] * 2, np.uint8)[..., None], (400, 2, 2, 1))
    options = {"patch": 2, "size": 2, "mean": (0,), "std": (1 / 255,), "seed": KEY}
    assert 0.4 < image_patches(pair, **options, flip=True)[:, 0, 0].mean() < 0.6
    assert not image_patches(pair, **options)[:, 0, 0].any()


@pytest.mark.parametrize("change, error", [
    ({"images": np.zeros((1, 4, 4, 1), "f4")}, "images.dtype is float32; accepted: uint8"),
    ({"images": np.zeros((1, 4, 4, 4), "u1")}, r"images.shape is \(1, 4, 4, 4\)"),
    ({"size": 5}, "size is 5; accepted: 1 to 4, the smaller side"),
    ({"patch": 3}, "patch is 3; accepted: a divisor of size, 4"),
    ({"mean": (0, 0)}, "mean is 2 numbers; accepted: 1, one for each channel"),
    ({"std": (0,)}, "std is .*accepted: numbers above 0"),
    ({"mix": np.zeros(3, "f4")}, r"mix is float32 \(3,\); accepted: float32 \(1,\)"),
    ({"dtype": np.float64}, "dtype is float64; accepted: float32, float16 or bfloat16"),
    ({"flip": 1}, "flip is"), ({"pad": -1}, "pad is -1"), ({"before": -1}, "before is -1"),
])  # fmt: skip
def test_arguments(change, error):
    options = {"images": np.zeros((1, 4, 4, 1), "u1"), "patch": 2, "size": 4, "mean": (0,),
               "std": (1,)} | change  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=f"image_patches: {error}"):
        image_patches(**options)


def test_raw_runs_on_a_gpu(gpu):
    images, options = problem((2, 16, 16, 3), gpu, patch=4, size=16)
    assert explain(image_patches, images, **options).chosen == "raw-simt"


def test_calls_alike_draw_windows_of_their_own(xp):
    shape, options = CASES["a window anywhere"]
    images, options = problem(shape, xp, **options)
    for step in range(4):  # from the third on as planned
        options["seed"] = Key(5, 1, step)
        wanted = formula(to_cpu(images), **options)
        np.testing.assert_allclose(to_cpu(image_patches(images, **options)), wanted, atol=1e-5)
