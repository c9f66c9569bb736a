"""The training step of whole models beside PyTorch's: forward, loss, backward, clipping, update.

What is timed is ``runtime.training_step``, as a run calls it: with the copy of its batch from the
host. All implementations begin with the same parameters and repeat one batch without padding; those
of PyTorch have it on the GPU. A step is timed only if its first loss is within LOSS_TOLERANCE of
gpuattn's, and so is the last one of some updates, which must be smaller.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.autodiff.tensor import Tensor
from gpuattn.bench import results, timing
from gpuattn.bench.cases import Cell
from gpuattn.bench.comparison import medians
from gpuattn.bench.fused.cases import zipf_tokens
from gpuattn.bench.peers import timing as peers
from gpuattn.bench.peers.train import HuggingFacePeer, Peer
from gpuattn.bench.train.cases import Step
from gpuattn.data.batching import LanguageModelBatch, PackedLoader, token_order
from gpuattn.data.images import ImageLoader
from gpuattn.data.masking import MARKS, MaskedLoader, Texts
from gpuattn.data.tokenizer import EOS, SPECIALS, UNK, BaseTokenizer
from gpuattn.models import GPT2, Bert, TranslationModel, ViT
from gpuattn.optim import AdamW
from gpuattn.runtime.training_step import TrainingStep
from gpuattn.runtime.workspace import Workspace

UPDATES = 10  # of the check of losses
LOSS_TOLERANCE = 0.02  # of a loss, relative: 16 bits, and other random bits of dropout


class Ours:
    """Our model of a case, its optimizer and a batch. ``parts``, ``part``: as of a Workspace.

    For the peers: ``weights``, {name: float32 array} before the first step, and ``inputs``, int32
    (B, T): tokens (of translations both sides) and labels; of a BERT tokens, and (M,) the rows that
    it guesses and their labels; or images, uint8 (B, H, W, 3), and labels (B,).
    """

    def __init__(self, case: Step, xp: ModuleType, parts: int = 1, part: int | None = None) -> None:
        self.case, self.xp = case, xp
        self.model: Any
        self.batch: Any
        if case.translates:
            self.model, self.batch = TranslationModel(case.config()), _translations(case)
            arrays = self.batch.source, self.batch.target_in, self.batch.labels
            self.inputs = [array.reshape(case.shape) for array in arrays]
        elif case.image:
            self.model, self.batch = ViT(case.config()), _images(case)
            self.inputs = [self.batch.images, self.batch.labels]
        elif case.masked:
            self.model, self.batch = Bert(case.config()), _hidden_tokens(case)
            tokens = self.batch.tokens.reshape(case.shape)
            self.inputs = [tokens, self.batch.rows, self.batch.labels]
        else:
            self.model = GPT2(case.config())
            self.read(texts(case))
        where = "numpy" if xp is np else "cuda"
        self.workspace = Workspace(self.model, where, case.dtype, parts=parts, part=part)
        self.optimizer = AdamW(
            self.workspace, betas=case.betas, eps=case.eps, weight_decay=case.weight_decay,
            max_norm=case.clip,
        )  # fmt: skip
        whole = self.workspace.initial  # of all parts
        self.weights = {n: np.array(to_cpu(x)) for n, x in self.workspace.weights(whole).items()}
        self._masters = np.array(to_cpu(self.workspace.masters))
        self._state = self.optimizer.state.array.copy()

    def read(self, inputs: Sequence[np.ndarray]) -> None:
        """Continue with other ``inputs``, of a language model: tokens and labels, int32 (B, T)."""
        self.inputs = tokens, labels = list(inputs)
        self.batch = LanguageModelBatch(tokens, labels, token_order(tokens.ravel()))

    def loss(self, batch: Any, dloss: Any) -> Tensor:
        """Return the loss of a batch, as a TrainingStep asks for it."""
        if self.case.translates:
            return self.model.loss(batch, self.case.smoothing, dloss)
        if self.case.image:
            return self.model.loss(
                batch.images, batch.labels, dloss, label_smoothing=self.case.smoothing
            )
        if self.case.masked:
            return self.model.masked_loss(
                batch.tokens, batch.rows, batch.labels, dloss,
                label_smoothing=self.case.smoothing, **batch.packing,
            )  # fmt: skip
        return self.model.loss(batch.tokens, batch.labels, dloss, order=batch.order)

    def restart(self) -> None:
        """Undo all updates."""
        self.workspace.masters[...] = self.xp.asarray(self._masters)
        self.workspace.sync_model()
        for name in self.workspace.moments:
            getattr(self.workspace, name).fill(0)
        self.optimizer.state.array[...] = self._state


class Updates:
    """Updates of ``ours`` on its batch by a TrainingStep on the current stream, one a call.

    ``ranks``: which make an update together. ``settings``: of the TrainingStep.
    """

    def __init__(self, ours: Ours, ranks: int = 1, **settings: Any) -> None:
        self.ours, tokens = ours, ours.batch.target_tokens * ranks
        stream = None if ours.xp is np else ours.xp.cuda.get_current_stream()
        self.step = TrainingStep(
            ours.model, ours.optimizer, ours.loss, tokens=tokens, stream=stream, **settings
        )

    def __call__(self) -> None:
        self.step(self.ours.batch, learning_rate=self.ours.case.learning_rate)

    def restart(self) -> None:
        """Undo all updates."""
        self.ours.restart()
        self.step.clear_loss()
        self.step.draws = 0

    def loss(self) -> float:
        """Return the mean loss of the updates since the last call."""
        return self.step.mean_loss()


def _translations(case):
    """Return a packed batch of sentences of one length."""
    sentences, length = case.shape
    words = sentences * (length - 1), case.vocab - UNK - 1
    sides = [zipf_tokens(*words, seed).reshape(sentences, -1) + UNK + 1 for seed in (0, 1)]
    pairs = list(zip(*(side.tolist() for side in sides), strict=True))
    (batch,) = PackedLoader(pairs, case.tokens, seed=0).epoch(0)
    return batch


@dataclass(frozen=True)
class _Vocabulary:
    """What a MaskedLoader reads of a tokenizer, with the ids of ours."""

    size: int
    marks, mask, specials = BaseTokenizer.marks, BaseTokenizer.mask, BaseTokenizer.specials

    def __len__(self):
        return self.size


def _hidden_tokens(case):
    """Return a packed batch of texts of one length, of whose tokens a share is hidden."""
    texts, length = case.shape
    words = zipf_tokens(texts * (length - MARKS), case.vocab - SPECIALS) + SPECIALS
    lines = np.insert(words.reshape(texts, -1), length - MARKS, EOS, axis=1)
    found = Texts(lines.ravel(), (EOS,), length - MARKS)
    loader = MaskedLoader(found, case.tokens, 0, case.masked, _Vocabulary(case.vocab))
    (batch,) = loader.epoch(0)
    return batch


def _images(case):
    """Return a batch of images that learning by heart tells apart."""
    count, rng = case.shape[0], np.random.default_rng(0)
    images = rng.integers(0, 256, (count, case.image, case.image, 3), np.uint8)
    labels = rng.integers(0, case.vocab, count, np.int32)
    (batch,) = ImageLoader(images, labels, np.arange(count), count, 0).all()
    return batch


def texts(case: Step, seed: int = 0) -> list[np.ndarray]:
    """Return the tokens and labels of a language model's case, int32 (B, T)."""
    text = zipf_tokens(case.tokens + 1, case.vocab, seed)
    return [part.reshape(case.shape) for part in (text[:-1], text[1:])]


# ---- the comparison -----------------------------------------------------------------------------


def measure(
    cell: Cell, xp: ModuleType, ceilings: dict[str, float], impl: str | None = None,
    with_peers: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of results of a Cell; ``results.py`` describes its fields.

    Raises AssertionError if our loss does not fall, or differs with graphs.
    """
    if xp is np:
        updates = Updates(Ours(cell.case, np))
        losses = {"eager": losses_of(updates, updates)}
        check_losses("eager", losses)
        return _row(cell, {"eager": timing.time_call(updates, False)}, losses, {}, ceilings)
    stream, names = xp.cuda.Stream(non_blocking=True), cell.peers if with_peers else ()
    try:
        beside = peers.on_stream(stream) if names else contextlib.nullcontext()
        pool = xp.cuda.MemoryPool()  # of our arrays alone, to measure their memory
        with stream, beside, xp.cuda.using_allocator(pool.malloc):
            return _on_gpu(cell, xp, pool, names, ceilings)
    finally:
        peers.release()


def _on_gpu(cell, xp, pool, names, ceilings):
    launches, losses, peaks, missing = {}, {}, {}, {}
    ours = Ours(cell.case, xp)
    launches["eager"] = eager = Updates(ours, graphs=False, tuned=False)
    losses["eager"] = losses_of(eager, eager)
    check_losses("eager", losses)
    peaks["eager"] = pool.total_bytes()

    refusals = []
    replayed = Updates(ours, notify=refusals.append)
    for _ in range(2):  # graphs are captured the second time
        replayed()
    if not refusals:
        pool.free_all_blocks()
        launches["graph"] = replayed
        losses["graph"] = losses_of(replayed, replayed)
        check_losses("graph", losses)
        peaks["graph"] = pool.total_bytes() + replayed.step.calls.held_bytes()

    made: dict[type[Peer], Peer] = {}
    for name in names:
        with peers.noting(missing, name):
            kind = HuggingFacePeer if name.startswith("hf") else Peer
            peer = made[kind] = made.get(kind) or kind(cell.case, ours)
            compiled = f"{name} {cell.case.model}"  # each has its own limit of time to compile
            launch = peers.capture(compiled, functools.partial(peer.call, name), [()])
            losses[name] = losses_of(peer, launch)
            check_losses(name, losses)
            launches[name], peaks[name] = launch, peer.held_bytes() + launch.peak_bytes
    row = _row(cell, timing.alternate(launches), losses, missing, ceilings)
    refusal = {"no_graph": refusals[0]} if refusals else {}
    return row | {"peak_bytes": peaks} | refusal


def losses_of(updates: Any, launch: Callable[[], Any]) -> list[float]:
    """Return the [first, last] loss of UPDATES calls of ``launch``, from the start."""
    updates.restart()
    launch()
    first = updates.loss()
    for _ in range(UPDATES - 2):
        launch()
    updates.loss()
    launch()
    return [first, updates.loss()]


def check_losses(name: str, losses: dict[str, list[float]]) -> None:
    """Raise AssertionError unless ``losses[name]`` fall and are near those of "eager"."""
    first, last = losses[name]
    if not last < first:
        raise AssertionError(f"{name}: the loss went from {first:.4g} to {last:.4g}")
    for when, loss, our in zip(("first", "last"), losses[name], losses["eager"], strict=True):
        if not abs(loss - our) <= LOSS_TOLERANCE * our:
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
