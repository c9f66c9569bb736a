"""TrainingStep by itself: equal bits to the trainer's, the example, refusals."""

import doctest
import itertools

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import gpuattn.runtime
from gpuattn.arrays import to_cpu
from gpuattn.data.batching import LanguageModelBatch, token_order
from gpuattn.optim import AdamW, ExponentialAverage
from gpuattn.runs.config import TrainConfig
from gpuattn.runtime import TrainingStep, Workspace, training_step
from gpuattn.tasks.language import LanguageTask
from gpuattn.train.progress import Listener
from gpuattn.train.state import tensors_of
from gpuattn.train.trainer import Trainer

UPDATES, ACCUMULATE = 7, 2


@pytest.fixture
def config(tmp_path):
    letters = np.random.default_rng(0).choice(list("abcdefgh \n"), 3000)
    (tmp_path / "text").write_text("".join(letters))
    return TrainConfig(
        model="gpt2", lm=str(tmp_path / "text"), tokenizer="chars", dim=32, heads=2, layers=1,
        block=16, dropout=0.1, batch=128, lr=1e-2, warmup=3, length=f"{UPDATES}u", ema=0.9,
        accumulate=ACCUMULATE, label_smoothing=0.1, precision="fp32", deterministic=True,
    )  # fmt: skip


def by_trainer(config, device):
    trainer = Trainer(LanguageTask(config), device, Listener())
    assert trainer.run(lambda: False, lambda: {"loss": 0.0, "score": 0.0}, lambda row: None)
    return trainer


def by_steps(config, device, trainer, graphs=True, stream=None):
    """Make the updates of a Trainer with only a model, an optimizer and batches."""
    task = LanguageTask(config)
    model = task.model
    workspace = Workspace(model, device, "float32", "float32")
    optimizer = AdamW(
        workspace, betas=(0.9, config.beta2), weight_decay=config.weight_decay,
        max_norm=config.clip or None, seed=config.seed,
    )  # fmt: skip

    def loss(batch, dloss):
        settings = {"label_smoothing": config.label_smoothing, "order": batch.order}
        return model.loss(batch.tokens, batch.labels, dloss, **settings)

    step = TrainingStep(
        model, optimizer, loss, tokens=config.batch, graphs=graphs, tuned=False, stream=stream,
        average=ExponentialAverage(workspace, config.ema),
    )  # fmt: skip
    for _, module in model.modules():
        module.deterministic = True
    loader = task.corpus.loader(0)
    batches = itertools.chain.from_iterable(loader.epoch(number) for number in itertools.count())
    for update in range(UPDATES):
        taken = itertools.islice(batches, ACCUMULATE)
        step(*taken, learning_rate=trainer.schedule(update, None))
    return step


def assert_same_bits(step, trainer):
    states = step.workspace.state_dict() | {"average": step.average.average}
    others = tensors_of(trainer.step)
    assert states.keys() | {"optimizer_state"} == others.keys()
    for name, array in states.items():
        np.testing.assert_array_equal(to_cpu(array), to_cpu(others[name]), err_msg=name)


def test_steps_alone_give_the_bits_of_the_trainer(config):
    trainer = by_trainer(config, "numpy")
    with threadpool_limits(1, "blas"):  # as the trainer: more threads may add in another order
        step = by_steps(config, "numpy", trainer)
    assert_same_bits(step, trainer)
    assert step.draws == trainer.at.draws == UPDATES * ACCUMULATE
    assert 0 < step.mean_loss() < np.log(20) and step.mean_loss() == 0


def test_steps_alone_on_a_gpu_with_and_without_graphs(gpu, config, delayed):
    """Called on the default stream, which their stream is ordered with, and on another stream."""
    trainer = by_trainer(config, "cuda")
    for graphs in (True, False):
        assert_same_bits(by_steps(config, "cuda", trainer, graphs), trainer)
    stream = gpu.cuda.Stream(non_blocking=True)
    gpu.cuda.Device().synchronize()
    with stream:
        assert_same_bits(by_steps(config, "cuda", trainer, stream=stream), trainer)


def test_gradients_that_are_taken_and_put_back_make_an_update(config):
    trainer = Trainer(LanguageTask(config), "numpy", Listener())
    step, workspace = trainer.step, trainer.workspace
    batches = list(itertools.islice(trainer.corpus.loader(0).epoch(0), 2))
    step.begin(0.1)
    for draw, batch in enumerate(batches):
        step.add(batch, draw)
    expected, divisor = workspace.grads.copy(), step.feed.numbers.divisor.copy()
    step.begin(0.1)
    step.add(batches[0], 0)
    first = step.take().copy()
    step.add(batches[1], 1)
    second = step.take()
    assert np.abs(second - expected).max() > 1e-3  # the second batch has overwritten the first
    second += first
    step.feed.numbers.divisor[...] = 0
    step.put(sum(batch.target_tokens for batch in batches))
    np.testing.assert_allclose(workspace.grads, expected, atol=1e-6)
    assert step.feed.numbers.divisor == divisor
    name, tensor = next(iter(workspace.tensors.items()))
    tensor.grad_slot[...] = 1  # as if other ranks' batches alone had used it
    assert not workspace.finish() and (tensor.grad_slot == 1).all(), name


def test_the_example():
    found = doctest.DocTestFinder().find(TrainingStep, "TrainingStep", training_step)
    ran = [doctest.DocTestRunner().run(example) for example in found if example.examples]
    assert [(result.attempted > 5, result.failed) for result in ran] == [(True, 0)]


def test_refusals_of_a_step(config):
    task = LanguageTask(config)
    step = by_steps(config, "numpy", Trainer(task, "numpy", Listener()))
    with pytest.raises(ValueError, match="batches is none; accepted: one or more"):
        step(learning_rate=0.1)
    with pytest.raises(TypeError, match="batches is tuple; accepted: a batch of gpuattn.data"):
        step((np.zeros((2, 3)), np.zeros((2, 3))), learning_rate=0.1)
    with pytest.raises(ValueError, match="tokens is 0; accepted: 1 or more"):
        step.rebatch(0)


def test_parts_of_a_batch_sum_to_its_gradient(config):
    trainer = Trainer(LanguageTask(config), "numpy", Listener())
    step = by_steps(config, "numpy", trainer)
    whole = trainer.corpus.loader(0).crops(0)
    pairs = zip(np.split(whole.tokens, 4), np.split(whole.labels, 4), strict=True)
    parts = [LanguageModelBatch(*pair, token_order(pair[0].ravel())) for pair in pairs]
    step.model.eval()  # dropout would differ
    norms = []
    for batches in ([whole], parts):
        step.rebatch(batches[0].target_tokens)
        step(*batches, learning_rate=0.0)
        norms.append(step.optimizer.state.norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_names_are_imported_on_first_use():
    assert gpuattn.runtime.TrainingStep is training_step.TrainingStep
    with pytest.raises(AttributeError, match="no attribute 'TrainStep'"):
        _ = gpuattn.runtime.TrainStep
