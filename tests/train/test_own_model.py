"""Models that a program wrote itself: one call an update, the plain loop, and going on later."""

import itertools

import numpy as np
import pytest

import gpuattn
from gpuattn import Tensor, nn, no_grad, optim
from gpuattn.arrays import BFLOAT16, to_cpu
from gpuattn.data.batching import LanguageModelLoader
from gpuattn.errors import CheckpointError, ConfigError, GradientError
from gpuattn.models import GPT2, GPT2Config
from gpuattn.runtime import TrainingStep, Workspace, checkpoint
from gpuattn.runtime.feed import HostFeed
from gpuattn.train.own_model import Arrays, packed

SCHEDULE = optim.Schedule("cosine", 0.02, warmup=2, total=10)
DEVICES = {"numpy": "numpy", "cupy": "cuda"}


class Network(nn.Module):
    """Two layers with dropout, whose random numbers it leaves to the layers."""

    def __init__(self, width=16):
        self.hidden = nn.Linear(3, width, activation="gelu")
        self.dropout = nn.Dropout(0.25)
        self.out = nn.Linear(width, 1)

    def __call__(self, x):
        return self.out(self.dropout(self.hidden(x)))


def loss_of(model, x, y):
    return np.mean((model(x) - y) ** 2)


def made(width=16, device="numpy", **settings):
    gpuattn.manual_seed(5)
    model = Network(width).to(device=device)
    settings = {"lr": SCHEDULE, "weight_decay": 0.1, "max_norm": 1.0, **settings}
    return model, optim.AdamW(model, **settings)


def batch_of(n, rows=8):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((rows, 3), np.float32)
    return x, x.sum(1, keepdims=True)


def plain(model, optimizer, which):
    losses = []
    for n in which:
        loss = loss_of(model, *batch_of(n))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def called(model, optimizer, which, **settings):
    step = gpuattn.training_step(model, loss_of, optimizer, **settings)
    return [float(step(*batch_of(n))) for n in which]


def assert_same_bits(a, b):
    for name, value in a.state_dict().items():
        np.testing.assert_array_equal(value, b.state_dict()[name], err_msg=name)


def test_one_call_has_the_bits_of_the_plain_loop_in_which_dropout_differs_each_time():
    (a, first), (b, second) = made(), made()
    losses = called(a, first, range(6))
    assert losses == plain(b, second, range(6)) and len(set(losses)) == 6
    assert_same_bits(first, second)
    x, _ = batch_of(0)
    outputs = []
    for _ in range(2):
        outputs.append(b(x).data)
        loss_of(b, *batch_of(1)).backward()
        second.step(learning_rate=0)
    assert (outputs[0] != outputs[1]).any()


def test_the_bits_are_the_trainers_for_the_same_model_and_batches():
    ids = np.random.default_rng(0).integers(0, 30, 2000)
    loader = LanguageModelLoader(ids, block=16, batch=4, seed=0)
    batches = list(itertools.islice(loader.epoch(0), 5))
    config = GPT2Config(vocab=30, d_model=16, heads=2, layers=1, block=16, dropout=0.1)
    model, own = GPT2(config, seed=1), GPT2(config, seed=1)
    inner = optim.AdamW(Workspace(model), max_norm=1.0)
    trainers = TrainingStep(
        model, inner, lambda b, d: model.loss(b.tokens, b.labels, d, order=b.order), tokens=4 * 16
    )
    optimizer = optim.AdamW(own, lr=SCHEDULE, max_norm=1.0)
    step = gpuattn.training_step(own, lambda m, x, y: m.loss(x, y), optimizer)
    for n, batch in enumerate(batches):
        trainers(batch, learning_rate=SCHEDULE(n))
        assert float(step(batch.tokens, batch.labels)) == trainers.mean_loss()
    for p, q in zip(model.parameters(), own.parameters(), strict=True):
        np.testing.assert_array_equal(p.data, q.data)


@pytest.mark.parametrize("train", [plain, called])
def test_goes_on_bit_for_bit_from_a_file(train, tmp_path):
    model, optimizer = made()
    losses = train(model, optimizer, range(6))
    model, optimizer = made()
    before = train(model, optimizer, range(3))
    checkpoint.save(tmp_path, "state", optimizer.state_dict())
    other, resumed = made()
    tensors, _ = checkpoint.load(tmp_path, "state")
    resumed.load_state_dict(tensors)
    assert before + train(other, resumed, range(3, 6)) == losses
    assert resumed.updates == 6


def test_parts_of_a_batch_have_its_gradient_and_shapes_may_change():
    (a, first), (b, second) = (made(loss_scale=8.0) for _ in range(2))
    a.eval(), b.eval()
    whole, parts = called(a, first, range(3)), called(b, second, range(3), accumulate=4)
    np.testing.assert_allclose(whole, parts, rtol=1e-5)
    assert first.state.norm == pytest.approx(second.state.norm, rel=1e-4)
    step = gpuattn.training_step(a, loss_of, first)
    assert [float(step(*batch_of(0, rows))) > 0 for rows in (4, 12, 4)] == [True] * 3


def test_any_arrays_go_through_one_array_of_words(monkeypatch):
    rng = np.random.default_rng(0)
    arrays = (
        rng.standard_normal((3, 5)), np.arange(7, dtype=np.int64), np.array([True, False, True]),
        np.float32(2.5).reshape(()), np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::-1],
        np.zeros((0, 4), np.float16), np.arange(3).astype(BFLOAT16),
    )  # fmt: skip
    found = packed(Arrays(arrays, True)).arrays
    for array, view in zip(arrays, found, strict=True):
        assert view.dtype == array.dtype and view.shape == array.shape
        assert view.tobytes() == np.ascontiguousarray(array).tobytes()
    model, optimizer = made()
    want = called(model, optimizer, range(2))
    load = HostFeed.load
    monkeypatch.setattr(HostFeed, "load", lambda f, batch, **n: load(f, packed(batch), **n))
    assert called(*made(), range(2)) == want


def test_on_each_device_one_call_is_near_the_plain_loop(xp):
    """On a GPU the fourth call replays graphs."""
    device = DEVICES[xp.__name__]
    a, first = made(device=device)
    losses = called(a, first, range(4))
    b, second = made(device=device)
    for n, want in enumerate(losses):
        x, y = map(xp.asarray, batch_of(n))
        loss = loss_of(b, x, y)
        loss.backward(second.loss_scale)
        second.step()
        assert loss.item() == pytest.approx(want, rel=1e-4)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        np.testing.assert_allclose(to_cpu(p.data), to_cpu(q.data), rtol=1e-3, atol=1e-5)


# ---- errors ----


def test_a_loss_must_be_a_recorded_number():
    model, optimizer = made()
    x, y = batch_of(0)

    def step(loss):
        return gpuattn.training_step(model, loss, optimizer)(x, y)

    with pytest.raises(TypeError, match=r"result of loss is a Tensor of shape \(8, 1\); accepted"):
        step(lambda m, x, y: m(x))
    with pytest.raises(TypeError, match="result of loss is 1.5; accepted: a Tensor of shape"):
        step(lambda m, x, y: 1.5)
    with pytest.raises(GradientError, match="not recorded"), no_grad():
        step(loss_of)
    assert optimizer.updates == 0 and optimizer.state.step == 0


def test_a_parameter_without_a_gradient_is_named_before_anything_changes():
    model, optimizer = made()
    before = optimizer.state_dict()

    def loss(model, x, y):
        return np.mean(model.out(np.concatenate([x] * 5 + [y], 1)) ** 2)

    with pytest.raises(GradientError, match=r"reached hidden.weight, hidden.bias; accepted: one"):
        gpuattn.training_step(model, loss, optimizer)(*batch_of(0))
    optimizer.zero_grad()
    with pytest.raises(
        GradientError, match=r"no parameter has a gradient.*loss.backward\(\) first"
    ):
        optimizer.step()
    for name, value in optimizer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    for train in (plain, called):
        train(model, optimizer, [0])
        with pytest.raises(GradientError, match="no parameter has a gradient"):
            optimizer.step()


@pytest.mark.parametrize("part", ["gradients", "update"])
def test_a_loss_after_an_interrupted_call_is_that_of_its_own_batch(part, monkeypatch):
    model, optimizer = made()
    step = gpuattn.training_step(model, loss_of, optimizer)
    run, wanted = step.step.calls, plain(*made(), [0])

    def interrupted(name, *arguments, **settings):
        if name == "gradients":
            run(name, *arguments, **settings)
        if name == part:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step.step, "calls", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(*batch_of(0))
    assert float(step(*batch_of(0))) == wanted[0]


def test_the_optimizer_of_another_model_is_refused():
    (model, old), (_, other) = made(), made()
    with pytest.raises(ValueError, match="optimizer is of another model: it has hidden.weight, "):
        gpuattn.training_step(model, loss_of, other)
    some = optim.AdamW([model.out.weight, model.out.bias], lr=0.1)
    with pytest.raises(
        ValueError, match="without hidden.weight, hidden.bias; accepted.*requires_g"
    ):
        gpuattn.training_step(model, loss_of, some)
    model.hidden.weight.requires_grad = model.hidden.bias.requires_grad = False
    step = gpuattn.training_step(model, loss_of, some)
    step(*batch_of(0))
    optim.AdamW(model, lr=0.1)
    for late in (old, some):
        with pytest.raises(GradientError, match="another optimizer has taken them"):
            late.step()
    with pytest.raises(GradientError, match="another optimizer has taken them"):
        step(*batch_of(0))


def test_wrong_arguments_of_a_step_are_named():
    model, optimizer = made()
    for wrong, message in (
        ((Network, loss_of, optimizer), "model is a type; accepted: a gpuattn.nn.Module"),
        ((model, optimizer, loss_of), "loss is an AdamW; accepted: a function of the model"),
        ((model, loss_of, 0.1), "optimizer is 0.1; accepted: one of gpuattn.optim"),
    ):
        with pytest.raises(TypeError, match=message):
            gpuattn.training_step(*wrong)
    with pytest.raises(ValueError, match="accumulate is 0; accepted: 1 or more"):
        gpuattn.training_step(model, loss_of, optimizer, accumulate=0)
    step = gpuattn.training_step(model, loss_of, optimizer, accumulate=3)
    with pytest.raises(ValueError, match=r"array 0 of a batch is of shape \(8, 3\).*accumulate, 3"):
        step(*batch_of(0))
    with pytest.raises(TypeError, match="array 0 of a batch is a builtins.list; accepted: NumPy"):
        step([1.0], 2)
    with pytest.raises(TypeError, match="array 0 of a batch is <U1; accepted: numbers"):
        step(np.array(["a"]))
    optimizer.lr = None
    with pytest.raises(ValueError, match=r"AdamW: lr is None.*AdamW\(model, lr=1e-3\)"):
        step(*batch_of(0, 9))


def test_what_an_optimizer_takes():
    class Empty(nn.Module):
        pass

    leaf = Tensor(np.ones(3, np.float32), requires_grad=True)
    for wrong, kind, message in (
        (Empty(), ValueError, "model is an Empty without parameters"),
        ([], ValueError, "model is a list without parameters"),
        (leaf, TypeError, "model is a Tensor; accepted: .* Put it into a list"),
        ([np.ones(3)], TypeError, "model is holding a ndarray"),
        ([leaf * 2], ValueError, "model is holding a result"),
        ([Tensor(np.ones(3))], ValueError, "model is holding a Tensor without requires_grad"),
        ([Tensor(np.ones(3), requires_grad=True)], TypeError, "numpy float64; accepted: a float32"),
    ):
        with pytest.raises(kind, match=message):
            optim.AdamW(wrong)
    with pytest.raises(ValueError, match="AdamW: lr is -1; accepted: 0 or more, or a function"):
        optim.AdamW([leaf], lr=-1)
    with pytest.raises(ConfigError, match="bf15"):
        optim.AdamW([leaf], precision="bf15")
    with pytest.raises(ConfigError, match="total is None; accepted: the updates of the whole run"):
        optim.AdamW([leaf], lr=optim.Schedule("cosine", 0.1)).learning_rate()
    rate = optim.SGD([leaf, leaf], lr=optim.Schedule("invsqrt", 0.1, warmup=2)).learning_rate()
    assert rate == pytest.approx(0.05)
    with pytest.raises(ValueError, match="precision is 'fp32'; accepted: None: a Workspace"):
        optim.AdamW(Workspace(Network()), precision="fp32")


def test_the_state_of_another_architecture_is_refused_whole():
    _, optimizer = made()
    before = optimizer.state_dict()
    for other in (made(width=8)[1], optim.Lion(Network(), lr=0.1)):
        with pytest.raises(CheckpointError, match="AdamW: the state is of another model or optim"):
            optimizer.load_state_dict(other.state_dict())
    for name, value in optimizer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
