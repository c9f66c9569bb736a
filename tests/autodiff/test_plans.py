"""Planned calls: the same launches and results as calls that check and choose, for any sequence."""

import contextlib
import struct
import sys
import traceback
from collections import Counter

import fake_launches
import fake_runs
import numpy as np
import pytest
from arena import Arena
from checks import dtype_of
from fake_cublaslt import Array, CublasLt
from fake_gpu import GPUS
from ops import test_launch_plans as cases

import gpuattn
from gpuattn import Tensor, arrays, modes
from gpuattn import rng as keys
from gpuattn.autodiff import backward_pass, plans, tape
from gpuattn.cuda.kernels import kernel
from gpuattn.cuda.program import Program
from gpuattn.gemm import cublaslt
from gpuattn.impls import Call, Impl, Impls

PLAIN = np.ndarray
PLANNED = {  # ops that have a program wherever these cases call them, and their gradients
    "softmax", "layer_norm", "rms_norm", "gelu", "relu", "linear", "flash_attention",
}  # fmt: skip


def differences(before, now, arena):
    """Return the launches whose parameters differ, but for addresses outside the arena."""
    found = []
    assert list(before) == list(now)
    for launch, old, new in zip(before, before.parameters, now.parameters, strict=True):
        for a, b in zip(old, new, strict=True):
            if a == b:
                continue
            words = [struct.unpack_from(f"{len(x) // 8}Q", x) for x in (a, b)]
            pairs = [pair for pair in zip(*words, strict=True) if pair[0] != pair[1]]
            if len(a) % 8 or any(arena.holds(one) for pair in pairs for one in pair):
                found.append((launch, a, b))
    return found


def copy_of(noted):
    found = fake_launches.Noted()
    found.extend(noted)
    found.parameters = list(noted.parameters)
    noted.clear()
    noted.parameters.clear()
    return found


@pytest.fixture
def touched(monkeypatch):
    """The places where arrays are written without a launch while a call is recorded."""
    found = []

    def note():
        if arrays.recorders.get() is not None:
            frames = [f for f in traceback.extract_stack() if "/gpuattn/" in f.filename]
            found.append(f"{frames[-1].filename}:{frames[-1].lineno}")

    def noting(name):
        inner = getattr(PLAIN, name)

        def method(self, *args, **kwargs):
            note()
            return inner(self, *args, **kwargs)

        return method

    def ufunc(self, function, method, *inputs, out=None, **kwargs):
        plain = [x.view(PLAIN) if isinstance(x, Array) else x for x in inputs]
        if out is not None:
            note()
            kwargs["out"] = tuple(x.view(PLAIN) if isinstance(x, Array) else x for x in out)
        result = getattr(function, method)(*plain, **kwargs)
        if out is not None:
            return out[0]
        return result.view(Array) if isinstance(result, PLAIN) else result

    monkeypatch.setattr(Array, "__array_ufunc__", ufunc, raising=False)
    for name in ("__setitem__", "fill", "sort", "put", "partition", "itemset"):
        if hasattr(PLAIN, name):
            monkeypatch.setattr(Array, name, noting(name), raising=False)
    return found


@pytest.fixture
def programs(monkeypatch):
    """Counts runs of programs, by whether they are a forward or a gradient."""
    counts, new = Counter(), Program.__new__

    def made(cls, run, *rest):
        def counted(*args):
            found = run(*args)
            caller = sys._getframe(1).f_code.co_name
            counts["gradients" if caller == "gradients" else "forward", found is not None] += 1
            return found

        return new(cls, counted, *rest)

    monkeypatch.setattr(Program, "__new__", made)
    return counts


@pytest.fixture
def no_sums(monkeypatch):
    """Gradients of leaves are not added: what a sum reads is a copy unless a program made it."""

    def accumulate(leaf, grad, fresh, inner=backward_pass._accumulate):
        leaf.grad = None
        inner(leaf, grad, fresh)

    monkeypatch.setattr(backward_pass, "_accumulate", accumulate)


@pytest.mark.usefixtures("no_sums")
@pytest.mark.filterwarnings("ignore::gpuattn.errors.SlowPathWarning")
@pytest.mark.parametrize("card", ["8.0", "9.0"])
def test_planned_calls_launch_the_same(card, touched, programs, monkeypatch):
    arena, products = Arena(), []
    monkeypatch.setattr(cases, "as_array", arena.array)
    monkeypatch.setattr(arrays, "allocate", arena.empty)

    class Products(CublasLt):
        Epilogue = fake_runs.Products.Epilogue

        def matmul(self, *values):
            products.append(tuple(int(v) for i, v in enumerate(values) if i in (3, 5, 8, 10)))

    def program_of(*args, inner=plans.program_of, **kwargs):
        made = inner(*args, **kwargs)
        assert made is None or not touched
        touched.clear()
        return made

    monkeypatch.setattr(plans, "program_of", program_of)
    some = [
        (cases.rows, 384), (cases.rows, 1000), (cases.rows, 8192), (cases.table, 64),
        (cases.logits, 1000), (cases.logits, 50000), (cases.attention, 64), (cases.attention, 128),
        (cases.decoding, 64), (cases.layers, 64), (cases.layers, 384),
        (cases.updates, 1024),
    ]  # fmt: skip
    with fake_launches.launches_on(GPUS[card]) as noted:
        monkeypatch.setattr(cublaslt, "library", lambda: (Products(), ""))
        monkeypatch.setattr(cublaslt, "handle", lambda device: 7)
        sys.modules["cupy"].zeros = arena.zeros
        for run, size in some:
            for dtype in cases.DTYPES:
                turns = []
                with modes.without_plans():
                    run(dtype, size)
                for turn in range(5):
                    arena.reset()
                    noted.clear()
                    noted.parameters.clear()
                    products.clear()
                    with modes.without_plans() if turn == 0 else contextlib.nullcontext():
                        run(dtype, size)
                    turns.append((copy_of(noted), list(products)))
                for launches, multiplied in turns[1:]:
                    assert not differences(turns[0][0], launches, arena), (run, size, dtype)
                    assert len(multiplied) == len(turns[0][1])
                    for pair in zip(np.ravel(multiplied), np.ravel(turns[0][1]), strict=True):
                        assert pair[0] == pair[1] or not any(map(arena.holds, pair))
    assert programs["forward", True] > 50 and programs["gradients", True] > 50


@pytest.mark.usefixtures("no_sums")
@pytest.mark.parametrize("recorded", [0, 5])
def test_a_planned_call_has_the_numbers_of_its_own_seed(recorded, programs, monkeypatch):
    arena = Arena()
    monkeypatch.setattr(cases, "as_array", arena.array)
    monkeypatch.setattr(arrays, "allocate", arena.empty)
    with fake_launches.launches_on(GPUS["9.0"]) as noted:
        x, weight = cases.floats(np.float32, 4, 64), cases.floats(np.float32, 64)
        arena.kept = arena.at

        def launches(seed):
            arena.reset()
            noted.clear()
            noted.parameters.clear()
            cases.back(gpuattn.dropout_add_norm(*cases.wanting(x, x * 1, weight), p=0.5, seed=seed))
            cases.back(gpuattn.gelu(*cases.wanting(x), p=0.5, seed=seed))
            return copy_of(noted)

        on_device = [
            keys.Key(seed, stream, arena.array(np.array([step], np.uint32)))
            for seed, stream, step in ((0, 0, 0), (0, 0, 0), (4, 5, 6))
        ]
        arena.kept = arena.at
        for _ in range(5):
            launches(recorded)
            launches(on_device[recorded % 2])
        for seed in (0, 7, 1 << 40, keys.Key(1, 2, 3), *on_device):
            programs.clear()
            planned = launches(seed)
            assert programs["forward", True] == 2 and programs["gradients", True] == 3
            with modes.without_plans():
                assert not differences(launches(seed), planned, arena), seed


@pytest.mark.usefixtures("no_sums")
def test_updates_have_programs_which_read_the_state_that_is_given(programs):
    with fake_launches.launches_on(GPUS["9.0"]) as noted:
        buffers = [cases.floats(np.float32, 1024) for _ in range(4)]
        states = [gpuattn.OptimizerState(buffers[0]) for _ in range(2)]

        def update(state, **options):
            noted.clear()
            noted.parameters.clear()
            gpuattn.gradient_statistics(buffers[1], state, max_norm=1.0)
            gpuattn.adamw(*buffers, state, betas=(0.9, 0.98), weight_decay=0.1, **options)
            return copy_of(noted)

        for _ in range(4):
            update(states[0])
        programs.clear()
        found = [update(state) for state in states]
        assert programs["forward", True] == 4
        for launches, state in zip(found, states, strict=True):
            with modes.without_plans():
                wanted = update(state)
            assert list(launches) == list(wanted)
            at = struct.pack("P", state.array.data.ptr)
            for one, other in zip(launches.parameters, wanted.parameters, strict=True):
                assert at in one and at in other
        for _ in range(4):
            programs.clear()
            update(states[0], seed=7)  # a number of its own each time
        assert programs["forward", True] == 1


@pytest.mark.parametrize("tokens, planned", [(6, True), (20000, False)])
def test_the_gradient_of_a_table_sorts_few_tokens_in_its_program(tokens, planned, programs):
    with fake_launches.launches_on(GPUS["9.0"]) as noted:
        weight = cases.floats(np.float32, 9, 64)
        index = cases.as_array(np.zeros(tokens, np.int32))
        for _ in range(5):
            programs.clear()
            noted.clear()
            cases.back(gpuattn.embedding(index, *cases.wanting(weight)))
        assert (programs["gradients", True] == 1) == planned
        assert ("token_order" in [launch.name for launch in noted]) == planned


def test_calls_without_gradients_go_straight_to_their_programs(programs, monkeypatch):
    with fake_launches.launches_on(GPUS["9.0"]):
        x, y = cases.floats(np.float32, 4, 64), cases.floats(np.float32, 4, 64)
        table = plans.table
        for _ in range(5):
            gpuattn.relu(x)
            found = Tensor(x) + Tensor(y)
        assert len(table.direct) == 2 and programs["forward", True] == 6
        wanted = Tensor(found.data)
        for name in tape.Box.__slots__:
            if name not in ("__weakref__", "_version"):
                assert getattr(found, name) is getattr(wanted, name), name
        assert found.version == wanted.version and found.version is not wanted.version
        for _ in range(5):
            (leaf,) = cases.wanting(x)
            cases.back(gpuattn.relu(leaf))
            gpuattn.dropout(x, 0.5, seed=1)
            gpuattn.softmax(Tensor(x), donate=True)
        assert len(table.direct) == 2, "calls with gradients, seeds, or donated Tensors"
        with gpuattn.use_impl(relu="reference"):
            before = programs.copy()
            for _ in range(5):
                gpuattn.relu(x)
            assert programs == before
        monkeypatch.setattr(plans, "MOST", len(table.young))
        gpuattn.silu(x)
        assert not table.direct, "it holds what the young table holds"
        gpuattn.relu(x)
        assert len(table.direct) == 1


def test_a_result_that_is_left_out_is_no_array():
    with fake_launches.launches_on(GPUS["9.0"]) as noted:
        q = cases.floats(np.float16, 2, 128, 4, 64)
        given = q, q * 1, q * 1
        for _ in range(5):
            noted.clear()
            out = gpuattn.flash_attention(*given)
            both = gpuattn.flash_attention(*given, return_lse=True)
        assert len(noted) == 2 and noted[0] == noted[1]
        assert out.shape == both[0].shape and both[1].shape == (2, 4, 128)
        assert out.strides == both[0].strides


def test_a_call_without_a_result_runs_once():
    def forward(x, *, needs):
        kernel("arithmetic.cu", "arithmetic", scalar="float", OPERATION=0)(
            (1,), (256,), x, x, x, x.size, 0
        )
        return None, None

    impls = Impls("doubled", Impl("raw-simt", forward))
    doubled = tape.op(lambda x: Call(impls, (x,)))
    with fake_launches.launches_on(GPUS["9.0"]) as noted:
        x = cases.floats(np.float32, 4, 64)
        for _ in range(6):
            noted.clear()
            assert doubled(x) is None and len(noted) == 1
        assert not plans.table.direct


@pytest.mark.usefixtures("no_sums")
def test_one_array_in_two_places_is_planned(programs, monkeypatch):
    """Such as the offsets of packed queries and keys; a call with two arrays has its own plan."""
    arena = Arena()
    monkeypatch.setattr(cases, "as_array", arena.array)
    monkeypatch.setattr(arrays, "allocate", arena.empty)
    with fake_launches.launches_on(GPUS["9.0"]) as noted:
        qkv = [cases.floats(np.float16, 96, 4, 64) for _ in range(3)]
        one, two = (arena.array(np.array([0, 40, 96], np.int32)) for _ in range(2))
        arena.kept = arena.at

        def launches(*offsets):
            arena.reset()
            noted.clear()
            noted.parameters.clear()
            names = "cu_seqlens_q", "cu_seqlens_k"
            given = dict(zip(names, offsets, strict=True))
            cases.back(gpuattn.flash_attention(*cases.wanting(*qkv), **given, max_seqlen_q=56))
            return copy_of(noted)

        for offsets in ((one, one), (one, two), (two, one), (two, two)) * 5:
            programs.clear()
            planned = launches(*offsets)
            with modes.without_plans():
                assert not differences(launches(*offsets), planned, arena)
        assert programs["forward", True] == 1 and programs["gradients", True] == 1


@pytest.mark.parametrize("recorded", [True, False])
def test_a_program_asks_whether_a_product_is_folded(recorded, monkeypatch):
    """Whatever the answer was when it was recorded."""
    arena = Arena()  # a product is planned for the alignment of its arrays
    monkeypatch.setattr(cases, "as_array", arena.array)
    monkeypatch.setattr(arrays, "allocate", arena.empty)
    products = fake_runs.Products()
    with fake_launches.launches_on(GPUS["9.0"]):
        monkeypatch.setattr(cublaslt, "library", lambda: (products, ""))
        monkeypatch.setattr(cublaslt, "handle", lambda device: 7)
        x, weight = (cases.floats(np.float16, 64, 64) for _ in range(2))
        dy = cases.floats(np.float16, 64, 64)
        for _ in range(3):
            node = gpuattn.linear(*cases.wanting(x, weight)).node
        offered = []

        def gradient(answer):
            del offered[:]
            before = products.computed
            (dx, dweight, _), _ = plans.gradients(
                node.plan, node.saved, (dy,), (None,) * 3, None,
                lambda product: offered.append(product) or answer,
                lambda fold: node.impl.backward(
                    node.saved, dy, needs=node.needs, into=(None,) * 3, activation=None, fold=fold
                ),
            )  # fmt: skip
            assert dweight.shape == weight.shape and (dx is None) == answer
            (product,) = offered
            assert product.weight is weight and product.shape == x.shape
            assert product.dz.data.ptr == dy.data.ptr
            return products.computed - before

        assert gradient(recorded) == gradient(recorded) == 1 + (not recorded)
        assert type(next(iter(node.plan.gradients.values()))) is Program
        assert gradient(recorded) == 1 + (not recorded)
        assert gradient(not recorded) == 2
        assert gradient(recorded) == 1 + (not recorded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_numpy_array_in_two_places(dtype):
    """Arrays of bfloat16 have no buffer, so nothing may ask for their memory."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((96, 2, 8)).astype(dtype_of(dtype)) for _ in range(3))
    offsets, equal = (np.array([0, 40, 96], np.int32) for _ in range(2))
    found = [
        gpuattn.flash_attention(
            q, k, v, cu_seqlens_q=one, cu_seqlens_k=other, max_seqlen_q=56, max_seqlen_k=56
        )
        for one, other in ((offsets, offsets), (offsets, equal)) * 4
    ]
    for out in found[1:]:
        np.testing.assert_array_equal(out, found[0])
