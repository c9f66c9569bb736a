"""Gradients of many weights in one launch on Hopper: results, deferral and launches."""

from types import SimpleNamespace

import emulator
import numpy as np
import pytest
from checks import check_hopper_compiles

from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.autodiff import side_stream
from gpuattn.autodiff.tensor import Tensor
from gpuattn.cuda import kernels, scratch
from gpuattn.cuda.gpu import gpu as gpu_of
from gpuattn.ops.linear import weight_gradients as op
from gpuattn.ops.linear.linear import linear

SHAPES = {  # columns of tiles, shapes of weights, rows, pairs of blocks (each pair is a team)
    "a weight for each pair": (384, [(256, 384), (384, 256)], 70, 2),
    "one shared by two, from the third step on": (
        384,
        [(256, 384), (256, 384), (256, 384)],
        150,
        2,
    ),
    "one in three parts": (384, [(256, 384)], 330, 3),
    "pairs of two weights, and none for the last block": (384, [(128, 384), (384, 256)], 200, 3),
    "a gradient of two columns of tiles": (384, [(384, 768)], 100, 2),
    "narrow: a weight for each pair": (256, [(256, 256), (256, 384)], 70, 2),
    "narrow: one in three parts": (256, [(256, 256)], 330, 3),
    "narrow: pairs of two weights, and none for the last block": (
        256,
        [(128, 256), (384, 256)],
        200,
        3,
    ),
}
KINDS = [(BFLOAT16, BFLOAT16), (np.float16, np.float32)]  # dtypes of the operands, of the gradients


def problem(shapes, rows, kinds, seed=0):
    """Return Problems, the second accumulating, and the float64 results: weights, then biases."""
    rng, problems, want, sums = np.random.default_rng(seed), [], [], []
    for n, (out, into) in enumerate(shapes):
        dz, x = (rng.integers(-2, 3, (rows, width)).astype(kinds[0]) for width in (out, into))
        place = np.full((out, into), np.nan, kinds[1])
        if n == 1:
            place[:] = rng.integers(-8, 9, place.shape)
        exact = dz.astype(np.float64).T @ x.astype(np.float64)
        want.append((exact + (place.astype(np.float64) if n == 1 else 0)).astype(kinds[1]))
        bias = None
        if not op.tiling(place.shape).turned:
            bias = np.full(out, np.nan if n % 2 == 0 else 3, kinds[1])
            sums.append((dz.astype(np.float64).sum(0) + 3 * (n % 2)).astype(kinds[1]))
        problems.append(op.Problem(dz, x, place, n == 1, bias, n % 2 == 1))
    return problems, want + sums


def moved(problems, move):
    """Return Problems whose arrays are elsewhere."""
    return [
        op.Problem(*(move(x) if isinstance(x, np.ndarray) else x for x in problem))
        for problem in problems
    ]


def assert_equal(problems, want):
    biases = [problem.bias for problem in problems if problem.bias is not None]
    for place, exact in zip([problem.out for problem in problems] + biases, want, strict=True):
        np.testing.assert_array_equal(to_cpu(place).astype(np.float64), exact.astype(np.float64))


@pytest.mark.parametrize("kinds", KINDS, ids=["bf16", "f16 to float32"])
@pytest.mark.parametrize("case", SHAPES)
def test_on_an_emulated_gpu(monkeypatch, case, kinds, host_compiler):
    columns, shapes, rows, pairs = SHAPES[case]
    monkeypatch.setattr(op, "COLUMNS", (columns,))
    room = np.full((2 * pairs, op.ROWS * columns), np.nan, np.float32)
    given = np.zeros(2 * pairs, np.int32)
    monkeypatch.setattr(op, "TEAM", 1)
    sums = np.full((2 * pairs, op.ROWS), np.nan, np.float32)
    places = [np.uint64(x.ctypes.data) for x in (room, sums, given)]
    monkeypatch.setattr(op, "_workspaces", lambda blocks: places)
    problems, want = problem(shapes, rows, kinds)
    problems = moved(problems, emulator.as_array)
    with emulator.Machine(seed=rows, multiprocessors=2 * pairs).in_place():
        assert all(op.fits(*problem[:3]) for problem in problems)
        op.launch_kernel(problems)
    assert_equal(problems, want)
    assert not given.any(), "a flag was not reset"


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("columns", op.COLUMNS)
def test_compiles_without_spills_and_matches_the_host_memory_size(nvrtc, columns, wide):
    constants = {"WIDE": wide, "TEAM": op.TEAM, "COLUMNS": columns}
    log = check_hopper_compiles(op.FILE, op.shared_bytes(columns), **constants)
    assert "C75" not in log, log


@pytest.mark.parametrize("shape, want", [
    ((1536, 384), (384, False)), ((384, 1536), (384, True)), ((384, 384), (384, False)),
    ((128, 768), (256, False)), ((128, 384), (384, False)), ((512, 512), (256, False)),
    ((1536, 512), (256, False)), ((1280, 5120), (256, True)), ((384, 65), None), ((320, 320), None),
])  # fmt: skip
def test_which_tiles_cover_a_gradient(shape, want):
    assert op.tiling(shape) == want


# ---- Hopper ------------------------------------------------------------------------------------


@pytest.fixture
def hopper(gpu):
    if not gpu_of(0).has_wgmma:
        pytest.skip("not a Hopper GPU")
    return gpu


LETTERS = [(1536, 384), (384, 1536), (1152, 384), (384, 384)]
NARROW = [(1536, 512), (512, 512), (2048, 512), (512, 2048), (1280, 1280)]


@pytest.mark.parametrize("shapes, rows", [
    (LETTERS, 4096), (LETTERS * 3, 1000), (LETTERS * 7, 500), ([(768, 2304), (768, 768)], 4100),
    (NARROW, 1500), (NARROW * 5, 4096),
])  # fmt: skip
@pytest.mark.parametrize("kinds", KINDS, ids=["bf16", "f16 to float32"])
def test_many_weights(hopper, monkeypatch, shapes, rows, kinds):
    monkeypatch.setattr(op, "MIN_STEPS", 0)
    problems, want = problem(shapes, rows, kinds, seed=rows)
    problems = moved(problems, hopper.asarray)
    before = kernels.launches[op.NAME]
    op.launch(problems)
    assert_equal(problems, want)
    assert kernels.launches[op.NAME] - before == -(-len(shapes) // op.MAX_WEIGHTS)


def test_flags_are_zeroed_before_any_launch_and_in_no_capture(monkeypatch):
    """The stream of the launch may be captured: a graph would zero them again and again."""
    done, memory = [], SimpleNamespace(Memory=lambda size: SimpleNamespace(ptr=64, size=size))
    runtime = SimpleNamespace(getDevice=lambda: 0, memsetAsync=lambda *args: done.append(args))
    stream = SimpleNamespace(ptr=77)
    other = SimpleNamespace(ptr=78, synchronize=lambda: done.append("over"))
    cuda = SimpleNamespace(
        memory=memory, runtime=runtime, get_current_stream=lambda: stream,
        Stream=lambda non_blocking: other,
    )  # fmt: skip
    monkeypatch.setattr(op, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(scratch, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(scratch, "_workspaces", {})
    for _ in range(2):
        assert op._workspaces(12) == (64, 64, 64)
    assert done == [(64, 0, 12 * 4, 78), "over"]


def test_the_library_computes_gradients_of_few_tiles(hopper):
    problems, want = problem([(384, 384)], 4096, KINDS[1])
    problems = moved(problems, hopper.asarray)
    before = kernels.launches[op.NAME]
    op.launch(problems)
    assert_equal(problems, want)
    assert kernels.launches[op.NAME] == before


@pytest.mark.parametrize("with_bias", [False, True])
def test_layers_defer_their_gradients(hopper, rng, with_bias):
    """A chain of layers needs one launch; a weight with an accumulated gradient is not deferred."""
    x, dy = (rng.standard_normal((4096, 384), np.float32).astype(BFLOAT16) for _ in range(2))
    weights = [rng.standard_normal((384, 384), np.float32) / 20 for _ in range(12)]
    weights = [hopper.asarray(w.astype(BFLOAT16)) for w in weights]

    def gradients(count, uses):
        layers = [[w, hopper.zeros(384, BFLOAT16)][: 1 + with_bias] for w in weights[:count]]
        layers = [[Tensor(x, requires_grad=True) for x in layer] for layer in layers]
        tensors = [tensor for layer in layers for tensor in layer]
        for tensor in tensors:
            tensor.grad_slot = hopper.full(tensor.data.shape, np.nan, np.float32)
        y = Tensor(hopper.asarray(x), requires_grad=True)
        for layer in layers * uses:
            y = linear(y, *layer)
        before = kernels.launches[op.NAME]
        with side_stream.enabled(y.data):
            y.backward(hopper.asarray(dy))
        return kernels.launches[op.NAME] - before, [to_cpu(t.grad_slot) for t in tensors]

    hopper.cuda.Device().synchronize()
    with hopper.cuda.Stream(non_blocking=True):
        for count, uses, launches in ((12, 1, 1), (6, 2, 0)):
            ran, found = gradients(count, uses)
            assert ran == launches
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(op, "takes", lambda *_: False)
                _, want = gradients(count, uses)
            for one, other in zip(found, want, strict=True):
                assert np.abs(one - other).max() < 1e-4 * np.abs(other).max()
