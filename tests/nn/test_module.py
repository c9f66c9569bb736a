"""Modules: parameters and their names, saving and loading states."""

import copy
import pickle

import numpy as np
import pytest

from gpuattn import Tensor, nn
from gpuattn.errors import CheckpointError
from gpuattn.nn.module import truncated_normal
from gpuattn.nn.tensors import Tensors
from gpuattn.runtime import Workspace


class Inner(nn.Module):
    def __init__(self, weight=None):
        if weight is None:
            weight = Tensor(np.ones((2, 3), np.float32), requires_grad=True)
        self.weight = weight
        self.dropout = nn.Dropout(0.5)


class Outer(nn.Module):
    def __init__(self):
        self.first = Tensor(np.zeros(4, np.float32), requires_grad=True)
        self.stack = [Inner(), Inner()]
        self.constant = Tensor(np.zeros(5, np.float32))
        self.tied = Inner(self.stack[0].weight)
        self.last = Tensor(np.zeros(1, np.float32), requires_grad=True)


def test_parameters_come_in_order_of_construction_and_shared_ones_once():
    outer = Outer()
    names = [name for name, _ in outer.named_parameters()]
    assert names == ["first", "stack.0.weight", "stack.1.weight", "last"]
    assert outer.parameters()[1] is outer.tied.weight


def test_tuples_and_dicts_are_searched_too():
    module = nn.Module()
    module.pair, module.named = (Inner(), Inner()), {"a": Inner()}
    names = [name for name, _ in module.named_parameters()]
    assert names == ["pair.0.weight", "pair.1.weight", "named.a.weight"]


def test_tensors_asked_for_again_are_those_of_now():
    class Holder(nn.Module):
        def __init__(self):
            self.layers = [nn.Linear(2, 3), nn.Linear(3, 2)]
            self.named = {"own": nn.Linear(2, 2)}
            self.late = None

    def replace_child(model):
        model.layers[1] = nn.Linear(3, 2)

    def replace_inside(model):
        model.layers[0].weight = nn.Linear(2, 3).weight

    def swap_with_a_setting(model):  # as many values as before
        model.named["own"].bias, model.late = None, nn.Linear(1, 1)

    def reorder(model):
        model.layers.reverse()

    changes = (
        replace_child, replace_inside, swap_with_a_setting, reorder,
        lambda model: setattr(model, "late", Tensor(np.ones(2))),
        lambda model: setattr(model, "more", nn.Linear(1, 2)),
        lambda model: model.layers.append(nn.Linear(2, 2)),
        lambda model: model.layers.pop(),
        lambda model: model.named.clear(),
        lambda model: delattr(model, "late"),
    )  # fmt: skip
    model = Holder()
    tensors = Tensors(model)
    for change in changes:
        before = tensors()
        assert tensors() is before  # nothing was looked for
        change(model)
        wanted = {id(tensor) for _, tensor in model.named_tensors()}
        assert wanted != {*map(id, before)} or change is reorder
        assert [*map(id, tensors())] == [id(tensor) for _, tensor in model.named_tensors()]


def test_modules_have_paths():
    names = [name for name, _ in Outer().modules()]
    assert names == [
        "", "stack.0", "stack.0.dropout", "stack.1", "stack.1.dropout", "tied", "tied.dropout",
    ]  # fmt: skip


def test_train_and_eval_reach_every_module():
    outer = Outer()
    assert outer.eval() is outer
    assert not any(module.training for _, module in outer.modules())
    outer.train()
    assert all(module.training for _, module in outer.modules())


def test_evaluating_disables_dropout_and_recording_and_restores_the_mode():
    outer = Outer()
    with outer.evaluating():
        assert not outer.tied.dropout.training
        assert (outer.first * 2).node is None
    assert outer.tied.dropout.training and (outer.first * 2).node is not None
    outer.eval()
    with outer.evaluating():
        pass
    assert not outer.training


def test_state_is_a_copy_and_loads_back_in_place():
    outer, other = Outer(), Outer()
    for i, p in enumerate(outer.parameters()):
        p.data = p.data + np.float32(i + 1)
    state = outer.state()
    before = [p.data for p in other.parameters()]
    other.load_state(state)
    for p, old, mine in zip(other.parameters(), before, outer.parameters(), strict=True):
        assert p.data is old  # a slice of a flat buffer keeps its memory
        np.testing.assert_array_equal(p.data, mine.data)
    state["first"][:] = 99
    assert outer.first.data[0] == 1


def test_load_state_casts_to_the_dtype_of_the_parameter():
    outer = Outer()
    state = {path: array.astype(np.float64) + 0.5 for path, array in outer.state().items()}
    outer.load_state(state)
    assert outer.first.dtype == np.float32 and outer.first.data[0] == 0.5


def faulty(state):
    yield "missing: last", {k: v for k, v in state.items() if k != "last"}
    yield "unknown: extra", {**state, "extra": np.zeros(3, np.float32)}
    yield r"first has shape \(5,\), want \(4,\)", {**state, "first": np.ones(5, np.float32)}
    yield "last is int64", {**state, "last": np.ones(1, np.int64)}


def test_load_state_loads_all_or_nothing():
    for message, bad in faulty({k: v + 7 for k, v in Outer().state().items()}):
        outer = Outer()
        with pytest.raises(CheckpointError, match=message):
            outer.load_state(bad)
        assert all((v == Outer().state()[k]).all() for k, v in outer.state().items())


def test_load_state_names_a_few_of_many_faults():
    with pytest.raises(CheckpointError, match="and 13 more"):
        Outer().load_state({f"x{i}": np.zeros(1, np.float32) for i in range(16)})


def test_save_and_load(tmp_path):
    outer, other, path = Outer(), Outer(), tmp_path / "outer.safetensors"
    for i, p in enumerate(outer.parameters()):
        p.data = p.data + np.float32(i + 1)
    outer.to(dtype="bfloat16").save(path)
    assert other.load(path) is other and other.first.dtype == np.float32
    for p, mine in zip(other.parameters(), outer.parameters(), strict=True):
        np.testing.assert_array_equal(p.data, mine.data.astype(np.float32))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(CheckpointError, match="cannot write .*nowhere/x: No such file"):
        outer.save(tmp_path / "nowhere" / "x")
    with pytest.raises(CheckpointError, match="nowhere cannot be read: No such file"):
        outer.load(tmp_path / "nowhere")


def test_load_names_all_faults_of_a_file_and_changes_nothing(tmp_path):
    outer, path = Outer(), tmp_path / "outer.safetensors"
    outer.extra = Tensor(np.ones(2, np.float32), requires_grad=True)
    outer.first.data = np.ones(5, np.float32)
    outer.save(path)
    other = Outer()
    other.more = Tensor(np.zeros(2, np.float32), requires_grad=True)
    faults = r"missing: more; unknown: extra; first has shape \(5,\), want \(4,\)"
    with pytest.raises(CheckpointError, match=f"{path.name}: .*{faults}"):
        other.load(path)
    assert not other.first.data.any()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        other.load(path)


def test_16_bit_parameters_of_an_optimizer_are_not_loaded_past_their_masters():
    outer = Outer()
    Workspace(outer, dtype="bfloat16")
    with pytest.raises(CheckpointError, match="an optimizer keeps float32 masters"):
        outer.load_state(Outer().state())


def test_to_casts_floats_of_all_tensors_and_drops_gradients():
    outer = Outer()
    outer.index = Tensor(np.arange(3))
    np.sum(outer.first * outer.first).backward()
    before = outer.first.data
    assert outer.to(dtype=np.float32, device="numpy") is outer and outer.first.data is before
    assert outer.to(dtype="float16").constant.dtype == outer.tied.weight.dtype == np.float16
    assert outer.index.dtype == np.int64 and outer.first.grad is None
    with pytest.raises(ValueError, match="Module.to: dtype is 'int8'; accepted: float32, float16"):
        outer.to(dtype="int8")
    with pytest.raises(ValueError, match="dtype is 'cuda'; accepted: .*. Try device='cuda'."):
        outer.to("cuda")
    with pytest.raises(ValueError, match="Module.to: device is 'gpu'; accepted: 'numpy' or 'cuda'"):
        outer.to(device="gpu")
    Workspace(outer.to(dtype="float32"))
    with pytest.raises(ValueError, match="a parameter is first, which is in the buffers of an opt"):
        outer.to(dtype="float16")


def test_summary_is_a_table():
    rows = [line.split("  ") for line in Outer().summary().splitlines()]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        ["parameter", "shape", "dtype", "count"],
        ["first", "(4,)", "float32", "4"],
        ["stack.0.weight", "(2, 3)", "float32", "6"],
        ["stack.1.weight", "(2, 3)", "float32", "6"],
        ["constant (frozen)", "(5,)", "float32", "5"],
        ["last", "(1,)", "float32", "1"],
        ["5 in all", "88 bytes", "22"],
    ]


def test_freezing_by_patterns():
    outer = Outer()
    assert outer.freeze("stack.0", "fir*") is outer
    assert [path for path, _ in outer.named_parameters()] == ["stack.1.weight", "last"]
    assert list(outer.state()) == list(Outer().state()) and "constant" in outer.state()
    np.sum(outer.first * outer.stack[1].weight[0, 0]).backward()
    assert outer.first.grad is None and outer.stack[1].weight.grad is not None
    with pytest.raises(
        ValueError, match=r"pattern is 'stck\.\*'; accepted: paths of .*stack.1.weight"
    ):
        outer.freeze("last", "stck.*")
    assert outer.last.requires_grad


def test_zero_grad_clears_gradients():
    outer = Outer()
    np.sum(outer.first * outer.first).backward()
    assert outer.first.grad is not None
    outer.zero_grad()
    assert outer.first.grad is None


def test_fresh_layers_repeat_after_manual_seed():
    from gpuattn import manual_seed

    weights = []
    for _ in range(2):
        manual_seed(3)
        weights.append(nn.Linear(4, 5).weight.data)
    np.testing.assert_array_equal(*weights)
    assert (nn.Linear(4, 5).weight.data != weights[0]).any()


def test_repr_is_a_tree_of_modules_with_sizes():
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm="pre", dropout=0.1)
    assert (
        repr(layer)
        == """\
TransformerEncoderLayer, 2,224 parameters
  attention: MultiHeadAttention(heads=2, kv_heads=2, rotary=False, causal=False), 1,088 parameters
    qkv: Linear, 816 parameters: weight (48, 16), bias (48,)
    out: Linear, 272 parameters: weight (16, 16), bias (16,)
    dropout: Dropout(p=0.1)
  feed_forward: FeedForward, 1,072 parameters
    inner: Linear(activation='relu'), 544 parameters: weight (32, 16), bias (32,)
    out: Linear, 528 parameters: weight (16, 32), bias (16,)
  norms.0 to norms.1, 2 alike: LayerNorm(eps=1e-05), 32 parameters: weight (16,), bias (16,)
  dropouts.0 to dropouts.1, 2 alike: Dropout(p=0.1)"""
    )


def test_repr_counts_shared_parameters_once():
    first, *rest = repr(Outer()).splitlines()
    assert first == "Outer, 17 parameters: first (4,), last (1,)"
    assert rest == [
        "  stack.0 to stack.1, 2 alike: Inner, 6 parameters: weight (2, 3)",
        "    dropout: Dropout(p=0.5)",
        "  tied: Inner, 6 parameters: weight (2, 3)",
        "    dropout: Dropout(p=0.5)",
    ]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_modules_keep_sharing(again):
    outer = Outer()
    other = again(outer)
    assert repr(other) == repr(outer)
    assert other.tied.weight is other.stack[0].weight is not outer.tied.weight
    other.first[...] = 1.0
    assert outer.first.tolist() == [0.0] * 4


def test_parameters_that_are_loaded_next_are_not_drawn():
    rng = np.random.default_rng(0)

    def new():
        layer = nn.TransformerDecoderLayer(8, 2, 16, rng=rng)
        return [layer, nn.Embedding(9, 8, positions="learned", max_length=5, rng=rng)]

    before = rng.bit_generator.state
    with nn.uninitialised():
        empty = new()
    assert rng.bit_generator.state == before
    for one, drawn in zip(empty, new(), strict=True):
        assert rng.bit_generator.state != before
        one.load_state(drawn.state())
        for p, q in zip(one.parameters(), drawn.parameters(), strict=True):
            np.testing.assert_array_equal(p.data, q.data)


def test_truncated_normal_weights():
    weight = truncated_normal(np.random.default_rng(0), (300, 200), 0.5).data
    assert weight.dtype == np.float32 and np.abs(weight).max() <= 1
    assert weight.std() == pytest.approx(0.5 * 0.8796, rel=0.02)  # of a normal one within 2
    assert abs(weight.mean()) < 0.01
    with nn.uninitialised():
        assert truncated_normal(None, (3, 2), 0.5).shape == (3, 2)
