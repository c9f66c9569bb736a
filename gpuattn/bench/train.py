"""A whole training step, ours beside PyTorch's: forward, loss, backward, clipping and update.

All begin with the same parameters, on one fixed batch without padding. A step gets a figure when
its first loss is ours within ``NEAR``, and some updates later is still, and has fallen.
"""

import contextlib
import functools

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.bench import results, timing
from gpuattn.bench.comparison import medians
from gpuattn.bench.fused_cases import zipf_tokens
from gpuattn.bench.peers import timing as peers
from gpuattn.bench.peers.train import Peer
from gpuattn.data.batching import PackedLoader, token_order
from gpuattn.data.tokenizer import UNK
from gpuattn.errors import UnsupportedError
from gpuattn.models import GPT2, TranslationModel
from gpuattn.optim import AdamW
from gpuattn.runtime.device import batch_to
from gpuattn.runtime.graphs import Replays
from gpuattn.runtime.workspace import Workspace

UPDATES = 10  # of the check
NEAR = 0.02  # how far a loss may be from ours, as a share: 16 bits, and other bits of dropout


class Ours:
    """Our model, its optimizer and a batch. ``loss``: of the last step, on the device.

    What the peers get: ``weights``, {name: float32 array} before the first step, and ``inputs``,
    int32 (B, T): tokens, of translations both sides, and labels.
    """

    def __init__(self, case, xp):
        self.xp = xp
        self.model, self._loss, self.inputs = (_translation if case.translates else _text)(case, xp)
        self.workspace = Workspace(self.model, "numpy" if xp is np else "cuda", case.dtype)
        self.optimizer = AdamW(
            self.workspace, betas=case.betas, eps=case.eps, weight_decay=case.weight_decay,
            max_norm=case.clip,
        )  # fmt: skip
        self.weights = {name: np.array(to_cpu(x)) for name, x in self.workspace.weights().items()}
        self._state = self.optimizer.state.array.copy()
        # As in graphs, what differs between updates is read where the device has it.
        self._draw = self.model.random.step = xp.zeros(1, np.uint32)
        self._rate = xp.full((), case.learning_rate, np.float32)
        self._dloss, self.loss = xp.ones((), np.float32), xp.zeros((), np.float32)

    def restart(self):
        """Take back all updates."""
        self.workspace.load_weights(self.weights)
        for name in self.workspace.moments:
            getattr(self.workspace, name).fill(0)
        self.optimizer.state.array[...] = self._state
        self._draw.fill(0)

    def read(self, inputs):
        """Go on with other ``inputs``, of a language model: tokens and labels, int32 (B, T)."""
        self._loss, self.inputs = _text_loss(self.model, inputs, self.xp), inputs

    def step(self):
        """Update the parameters once."""
        self.workspace.begin()
        self._draw += 1
        loss = self._loss(self._dloss)
        self.workspace.backward(loss, self._dloss)
        self.workspace.finish()
        self.optimizer.step(self._rate)
        self.loss[...] = loss.data


def _translation(case, xp):
    """Return (model, its loss as a function of the loss's gradient, inputs of the peers)."""
    sentences, length = case.shape
    words = sentences * (length - 1), case.vocab - UNK - 1
    sides = [zipf_tokens(*words, seed).reshape(sentences, -1) + UNK + 1 for seed in (0, 1)]
    pairs = list(zip(*(side.tolist() for side in sides), strict=True))
    (batch,) = PackedLoader(pairs, case.tokens, seed=0).epoch(0)
    model = TranslationModel(case.config())
    there = batch_to(batch, xp)
    inputs = [x.reshape(case.shape) for x in (batch.source, batch.target_in, batch.labels)]
    return model, lambda dloss: model.loss(there, case.smoothing, dloss), inputs


def _text(case, xp):
    """Return what ``_translation`` does, for a language model."""
    model, inputs = GPT2(case.config()), texts(case)
    return model, _text_loss(model, inputs, xp), inputs


def texts(case):
    """Return the tokens and labels of a language model's case, int32 (B, T)."""
    text = zipf_tokens(case.tokens + 1, case.vocab)
    return [part.reshape(case.shape) for part in (text[:-1], text[1:])]


def _text_loss(model, inputs, xp):
    tokens, labels = map(xp.asarray, inputs)
    order = [xp.asarray(part) for part in token_order(inputs[0].ravel())]
    return lambda dloss: model.loss(tokens, labels, dloss, order=order)


# ---- the comparison -----------------------------------------------------------------------------


def measure(cell, xp, ceilings, impl=None, with_peers=False):
    """Return the row of results of a Cell; ``results.py`` says what it holds.

    Raises AssertionError where our loss does not fall, or is another as a CUDA graph.
    """
    if xp is np:
        ours = Ours(cell.case, np)
        losses = {"eager": _losses(ours, ours.step)}
        _check("eager", losses)
        return _row(cell, {"eager": timing.time_call(ours.step, False)}, losses, {}, ceilings)
    stream, names = xp.cuda.Stream(non_blocking=True), cell.peers if with_peers else ()
    try:
        beside = peers.on_stream(stream) if names else contextlib.nullcontext()
        pool = xp.cuda.MemoryPool()  # ours alone, so that it says what we take
        with stream, beside, xp.cuda.using_allocator(pool.malloc):
            return _on_gpu(cell, xp, pool, names, ceilings)
    finally:
        peers.release()


def _on_gpu(cell, xp, pool, names, ceilings):
    launches, losses, peaks, missing = {}, {}, {}, {}
    ours = Ours(cell.case, xp)
    launches["eager"] = ours.step
    losses["eager"] = _losses(ours, ours.step)
    _check("eager", losses)
    peaks["eager"] = pool.total_bytes()

    said = []
    replays = Replays(said.append)
    replay = functools.partial(replays, "step", None, ours.step)
    for _ in range(2):  # the second time it is captured
        replay()
    if not said:
        pool.free_all_blocks()
        launches["graph"] = replay
        losses["graph"] = _losses(ours, replay)
        _check("graph", losses)
        peaks["graph"] = pool.total_bytes() + replays.pool.total_bytes()

    peer = None
    for name in names:
        try:
            peer = peer or Peer(cell.case, ours)
            which = f"{name} {cell.case.model}"  # each may take its time to compile
            launch = peers.capture(which, functools.partial(peer.call, name), [()])
            losses[name] = _losses(peer, launch)
            _check(name, losses)
        except (UnsupportedError, AssertionError) as error:
            missing[name] = str(error)
        else:
            launches[name], peaks[name] = launch, peer.held_bytes() + launch.peak_bytes
    row = _row(cell, timing.alternate(launches), losses, missing, ceilings)
    refusal = {"no_graph": said[0]} if said else {}
    return row | {"peak_bytes": peaks} | refusal


def _losses(trainer, launch):
    """Return [first, last] loss of UPDATES from the start on."""
    trainer.restart()
    launch()
    first = float(trainer.loss)
    for _ in range(UPDATES - 1):
        launch()
    return [first, float(trainer.loss)]


def _check(name, losses):
    """Raise AssertionError unless ``losses[name]`` fall, and are those of ours."""
    first, last = losses[name]
    if not last < first:
        raise AssertionError(f"{name}: the loss went from {first:.4g} to {last:.4g}")
    for when, loss, our in zip(("first", "last"), losses[name], losses["eager"], strict=True):
        if not abs(loss - our) <= NEAR * our:
            raise AssertionError(f"{name}: the {when} loss is {loss:.4g}, ours is {our:.4g}")


def _row(cell, times, losses, missing, ceilings):
    us, samples = medians(times)
    impl = "graph" if "graph" in us else "eager"
    row = {
        "op": cell.op, "case": cell.case.as_dict(), "direction": cell.direction, "impl": impl,
        "us": us[impl], "samples_us": samples[impl], "eager_us": us.pop("eager"),
        "eager_samples_us": samples.pop("eager"),
    }  # fmt: skip
    us.pop("graph", None), samples.pop("graph", None)
    row |= {"peers": us, "peer_samples_us": samples, "peers_missing": missing, "losses": losses}
    return results.rated(row, ceilings) | {"tokens_per_s": cell.case.tokens / row["us"] * 1e6}
