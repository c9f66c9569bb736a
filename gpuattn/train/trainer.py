"""The training loop: schedule, evaluation, stopping, saving; ``runtime.training_step`` computes.

Update n is a function of the config and n, so a run that was stopped or killed continues bit for
bit (on NumPy, and on a GPU with ``deterministic``; not runs of a given time, which depend on the
clock).
"""

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.arrays import keep_freed_memory, to_cpu
from gpuattn.errors import CheckpointError, MemoryLimitError
from gpuattn.ops.update.gradient_statistics import read_state
from gpuattn.optim import ExponentialAverage, Schedule
from gpuattn.parallel.agreement import is_agreed, silent
from gpuattn.parallel.communicator import Communicator, Single
from gpuattn.parallel.reducer import Reducer
from gpuattn.runtime import precision
from gpuattn.runtime.device import array_module, is_out_of_memory, memory_in_use
from gpuattn.runtime.graphs import Replays
from gpuattn.runtime.readback import Reading
from gpuattn.runtime.training_step import TrainingStep
from gpuattn.tasks.task import Task
from gpuattn.train import memory
from gpuattn.train.batches import Batches
from gpuattn.train.meter import Meter
from gpuattn.train.progress import Listener, Progress
from gpuattn.train.saving import Saves, saved_or_why
from gpuattn.train.setup import setup
from gpuattn.train.sharding import Sharing
from gpuattn.train.state import Position, arrays_of, load, synchronize
from gpuattn.train.threads import BlasThreads, threads_of
from gpuattn.train.validation import ValidLoss, by_all_ranks

REPORT_UPDATES, REPORT_SECONDS = 20, 2  # between two Progress, whichever comes first
ALONE = Single()


class Trainer:
    """Trains the model of a ``tasks.task.Task`` as its config says.

    ``device``: "numpy" or "cuda". ``listener``: a ``train.progress.Listener``. ``graphs``: whether
    updates run as CUDA graphs on a GPU (the bits are the same). ``communicator``: of the ranks that
    train together; each has a Trainer, and calls the same methods. ``sharing``: what this rank
    holds of masters, moments and averages; None: all. ``at``: the Position. ``step``: the
    TrainingStep. ``saves``: the Saves of this run; an update raises what one of them raised.
    """

    def __init__(
        self, task: Task, device: str, listener: Listener, graphs: bool = True,
        communicator: Communicator = ALONE, sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        self.task, self.listener, self.communicator = task, listener, communicator
        self.sharing = sharing
        self.model, self.corpus = task.model, task.corpus
        self.config = self.whole = config = task.config  # ``whole``: before batches are cut
        self.xp = array_module(device)
        if device == "numpy":
            keep_freed_memory()
        self.precision = precision.choose(config.precision, device)
        parts = setup(task, device, self.precision, communicator, sharing)
        self.workspace, self.optimizer, self.exchange, self.outer = parts

        def loss(batch, dloss):  # no method: a cycle of references would keep device memory
            return task.loss(batch, config.label_smoothing, dloss)

        self.step = TrainingStep(
            self.model, self.optimizer, loss, tokens=config.batch * config.replicas,
            average=ExponentialAverage(self.workspace, config.ema) if config.ema else None,
            fixed_shape=task.fixed_shape, graphs=graphs, tuned=not config.deterministic,
            notify=functools.partial(listener.say, "graphs"), exchange=self.exchange,
        )  # fmt: skip
        self.step.outer = self.outer
        self.reducer = Reducer(
            self.step, communicator, config.replicas, config.deterministic, bool(self.outer)
        )
        total = config.lr_decay or (config.length.amount if config.length.unit == "u" else None)
        self.schedule = Schedule(config.schedule, config.lr, config.warmup, total, config.lr_floor)
        self.at = Position(data=self.corpus.fingerprint)
        self.saves = Saves()
        self._batches = Batches(self.corpus, self.reducer.mine, config.replicas)
        self._completed = 0, 0, 0
        self._is_computing, self._saving = False, 0.0
        self.threads = None
        if device == "numpy":
            self.threads = BlasThreads(threads_of(config, communicator), self._probe)
        self.meter = Meter(
            self.xp, self.precision.dtype, task.flops, task.counted, communicator,
            parts.waited(communicator),
        )  # fmt: skip
        self._valid_loss, self.is_evaluating = ValidLoss(task, self.step), False
        self._kept: dict[str, Any] | None = None  # whole arrays, of all ranks
        self._loaded: dict[str, Any] | None = None  # the same, until ``begin``
        self._updates = 0  # since the last Progress
        self._noted = None  # the next Progress, until its numbers are copied from the device
        self._health = self.optimizer.state.read()

    @property
    def average(self) -> ExponentialAverage | None:
        """The moving average of the parameters, if the config has one."""
        return self.step.average

    def rehearse(self) -> None:
        """Start to compile the kernels of updates. For a new Trainer on a GPU, before ``load``."""
        with self.computing():
            batch = next(self.corpus.loader(0).epoch(0))
            self.step.rehearse(batch, more=self.config.update_batches > 1)

    # ---- the run ----

    def run(
        self, stop: Callable[[], bool], evaluate: Callable[[], dict | None],
        save: Callable[[dict | None], None],
    ) -> bool:  # fmt: skip
        """Train until the length is reached, patience is lost or ``stop()`` returns True.

        ``evaluate()`` returns a row of metrics, or None when stopped meanwhile. ``save(row)`` keeps
        the run after an evaluation, ``save(None)`` at a stop. Ranks stop together when ``stop()``
        of one is true. Each calls ``valid_loss`` in its ``evaluate``; rank 0 alone does more there,
        and saves.
        Returns whether the run is finished (False: stopped).
        Raises FloatingPointError, after ``save(None)``, when gradients are not finite for long.
        """

        def keep(row):
            self._kept = None
            if self.exchange and self.exchange.is_sharded:
                self._kept = self.exchange.whole(arrays_of(self.step))
            if self.outer:
                if not self._are_equal():
                    raise CheckpointError("the replicas differ until their next step together")
                self.outer.collect()
                kept = arrays_of(self.step)  # those of other ranks are on the host
                self._kept = {name: np.array(to_cpu(array)) for name, array in kept.items()}
            save(row)

        with self.computing():
            try:
                return self._run(stop, evaluate, keep)
            except FloatingPointError as error:
                if self.outer:  # of this rank alone: it ends the others, and saves nothing
                    raise
                told = FloatingPointError(f"{error}. {saved_or_why(keep)}")
                raise silent(told, self.communicator.rank > 0) from error
            finally:
                self._batches.restart()  # ends their thread

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Compute on the stream of the training step inside a block; synchronize at both ends.

        Everything that reads or writes what the steps compute belongs inside: other streams are
        not ordered with that one. On NumPy, the run's number of BLAS threads holds until the end of
        the outermost block.
        """
        if self._is_computing:
            yield
            return
        self._is_computing = True
        try:
            place = self.threads.kept() if self.threads else self._on_stream()
            with place, np.errstate(all="ignore"):  # ``precision.trouble`` finds inf and NaN
                yield
        finally:
            self._is_computing = False

    @contextlib.contextmanager
    def _on_stream(self):
        self.xp.cuda.Device().synchronize()
        with self.step.stream:
            yield
        self.step.stream.synchronize()

    def _run(self, stop, evaluate, save):
        self._reported = self._now()
        begin = self._reported - self.at.seconds
        if self.threads:
            self.threads.restart()
        self.meter.restart()
        while True:
            short = None
            try:
                if self.threads:
                    self.threads.next(self.at.update, alone=not self.saves.writing)
                # A run that was stopped before an evaluation that was due makes it first.
                if self.outer and self._reached_end():
                    self.outer.step(self.at.update)
                if self._due() and not self._evaluate(stop, evaluate, save):
                    return False
                if self._reached_end():
                    if not self.at.finished:  # an evaluation used up the rest of its time
                        self.at.finished = self.config.length.describe()
                        save(None)
                    return True
                self.at.seconds = self._now() - begin
                self._update()
            except Exception as error:
                one_sided = self.communicator.size > 1 and not is_agreed(error)
                if not is_out_of_memory(error) or one_sided:
                    raise
                short = str(error)  # only the text: the error holds the arrays of the step
            if short is not None:
                self._make_room(short, save)
                continue
            now, stopping = self._look(stop)
            self.at.seconds = now - begin
            if self._updates >= REPORT_UPDATES or now - self._reported > REPORT_SECONDS:
                self._note()
            self._tell()
            if stopping and self._are_equal():
                save(None)
                return False

    def _now(self):
        """Return the time by the clock of rank 0, so that all ranks decide alike."""
        return self._look(lambda: False)[0]

    def _look(self, stop):
        """Return the time by the clock of rank 0, and whether ``stop()`` of a rank is true."""
        own = time.perf_counter(), self.saves.seconds, bool(stop())
        found = self.communicator.gather(own)
        now, self._saving, _ = found[0]
        return now, any(stopping for *_, stopping in found)

    def _are_equal(self):
        """Return whether all ranks have the same parameters now."""
        return self.outer is None or self.outer.last == self.at.update

    def _make_room(self, short, save):
        """Continue from the last whole update with smaller batches, or save and raise."""
        at = self.at
        at.epoch, at.batch, at.draws = self._completed
        self.step.clear_loss()
        self._updates, self._noted = 0, None
        self.meter.restart()
        if self.average:
            self.average.updates = at.averaged
        parts = memory.next_parts(self.whole, at.parts)
        if parts is None:
            self._use_parts(at.parts)  # frees what the steps held
            saved = at.evaluated[0]
            if self._are_equal():
                save(None)
                saved = at.update
            error = MemoryLimitError(memory.nothing_smaller(self.config, saved, short))
            raise silent(error, self.communicator.rank > 0)
        batches = self.corpus.loader(at.epoch).batches(at.epoch)
        self._use_parts(parts)
        at.batch = at.batch * self.corpus.loader(at.epoch).batches(at.epoch) // batches
        self._completed, at.parts = (at.epoch, at.batch, at.draws), parts
        config = self.config
        self.listener.say(
            "memory", f"used up ({short}). Continuing from update {at.update:,} with batches of "
            f"{config.batch:,} tokens, {config.update_batches} an update",
        )  # fmt: skip

    def _use_parts(self, parts):
        """Cut each batch into ``parts``, and free the memory of batches of other sizes."""
        self.task.rebatch(memory.in_parts(self.whole, parts))
        self.config = self.task.config
        self._batches.restart()
        stream = self.step.stream
        if stream is not None:
            stream.synchronize()
        dtype = self.precision.grad_dtype(self.config.update_batches)
        if self.workspace.grads.dtype != dtype:
            self.workspace.keep_gradients_in(dtype)
        self.step.rebatch(self.config.batch * self.config.replicas)
        gc.collect()
        if stream is not None:
            self.xp.get_default_memory_pool().free_all_blocks()

    def _evaluate(self, stop, evaluate, save):
        """Evaluate and save; return False when stopped meanwhile with updates left to do."""
        self._note()
        self._tell(wait=True)
        begin = self._now()
        row = by_all_ranks(self, evaluate)
        if row is None:
            save(None)
            return False
        at = self.at
        at.evaluated = [at.update, at.epoch, at.seconds]
        at.evaluation = self._now() - begin
        at.seconds += at.evaluation  # may complete a run of a given time
        at.judge(row, self.config)
        if not at.finished and self._reached_end():
            at.finished = self.config.length.describe()
        at.early = bool(at.finished) and at.finished != self.config.length.describe()
        save(row)
        self.meter.measure()
        self.meter.restart()
        self._reported = self._now()
        at.evaluation = self._reported - begin
        return self._reached_end() or not self._look(stop)[1]

    def arrays(self) -> dict[str, Any]:
        """Return {name: flat array} of all that updates change, for a save that the run asks for.

        Those of all ranks, as NumPy arrays, where each holds others.
        """
        return self._kept or arrays_of(self.step)

    def share(self) -> float:
        """Return how much of the run is done, 0 to 1. A given time includes the last evaluation."""
        return self.at.share(self.config, self.corpus, self._saving)

    def _reached_end(self):
        return bool(self.at.finished) or self.share() >= 1

    def _due(self):
        """Return whether the parameters as they are now must be evaluated."""
        at = self.at
        if at.update == at.evaluated[0] or not self._are_equal():
            return False
        return self._reached_end() or at.is_evaluation_due(self.config)

    # ---- an update ----

    def _update(self):
        """Update once."""
        at = self.at
        self.saves.check()
        self.step.begin(self.schedule(at.update, None if self.schedule.total else self.share()))
        self.reducer.compute(self._rounds())
        self.saves.hold()
        self.step.apply()
        at.update += 1
        self.communicator.note(at.update)
        if self.outer and self.outer.is_due(at.update):
            self.outer.step(at.update)
        at.tokens += self.reducer.tokens
        at.averaged = self.average.updates if self.average else 0
        self._completed = at.epoch, at.batch, at.draws
        self._updates += 1

    def _rounds(self):
        """Yield (draw, batches of this rank's replicas) of an update: ``accumulate`` times, or
        fewer at the end of a run."""
        for _ in range(self.config.accumulate):
            batches = self._batches.next(self.at)
            yield self.at.draws, batches
            self.at.draws += 1
            self.meter.batches += batches
            if self.share() >= 1:
                break

    def _probe(self):
        """Compute the gradients of the next batch, without effect on the run."""
        at = self.at
        self.step.try_gradients(
            next(self.corpus.loader(at.epoch).epoch(at.epoch, at.batch)), at.draws
        )

    def look(self, measure: Callable[[Callable, Callable], Any]) -> Any:
        """Return ``measure(update, again)``, called on the stream of the updates, to time them.

        ``update()`` makes the next one; ``again()`` computes that of the last batch once more, op
        by op, as CUDA graphs replay it.
        """
        with self.computing():
            return measure(self._update, self.step.repeat)

    def _note(self):
        """Start to copy the numbers of the next Progress to the host, without synchronizing."""
        if not self._updates:
            return
        self._tell(wait=True)
        self.reducer.sum_losses()
        share = self.share()
        held = self.step.calls.held_bytes() if isinstance(self.step.calls, Replays) else 0
        left = self.at.seconds * (1 - share) / share if share else float("inf")
        facts = {
            "update": self.at.update, "epoch": self.at.epoch, "seconds": self.at.seconds,
            "share": share, "eta": left, "memory": memory_in_use(self.xp) + held,
            "at_most": bool(self.config.until or self.config.patience),
            "counted": self.task.counted,
            **self.meter.facts(self._updates, self.at.spent),
        }  # fmt: skip
        if self.threads and self.saves.ended < self._reported:  # no save ran beside
            self.threads.observe(facts["rate"])
        reading = Reading(self.step.loss_sum, self.optimizer.state.array)
        self._noted = reading, self.step.loss_tokens, facts
        self.step.clear_loss()
        self._updates = 0
        self._reported = self._now()

    def _tell(self, wait=False):
        """Tell the listener what was noted once its numbers are on the host; ``wait``: now."""
        if not self._noted:
            return
        reading, tokens, facts = self._noted
        ready = reading.ready()
        if self.communicator.size > 1:  # what follows must be at the same update on all ranks
            ready = facts["update"] < self.at.update
        if not (wait or ready):
            return
        (loss, state), self._noted = reading.values(), None
        before, self._health = self._health, read_state(state)
        for sentence in precision.trouble(before, self._health, self.workspace, self.config):
            self.listener.say("warning", sentence)
        facts |= {"loss": float(loss) / tokens, "learning_rate": self._health["learning_rate"]}
        self.listener.progress(Progress(**facts))

    def valid_loss(self, batches: Iterable[Any] | None = None) -> float:
        """Return the mean cross-entropy per target token of ``batches``, without label smoothing.

        By default of all batches of validation. Call it while the run evaluates.
        """
        batches = self.corpus.valid_batches() if batches is None else batches
        return self._valid_loss(batches, self.evaluating_ranks)

    @property
    def evaluating_ranks(self) -> Communicator:
        """The ranks that evaluate together now."""
        return self.communicator if self.is_evaluating else ALONE

    def load(self, folder: str | Path) -> None:
        """Continue from the state in a run folder. Raises as ``state.load``."""
        self.at, self._loaded = load(folder, self.step, self.corpus.fingerprint)
        at = self.at
        if at.parts > 1:
            self._use_parts(at.parts)
        self._health = self.optimizer.state.read()

    def begin(self, over: bool = False) -> bool:
        """Take position and state of rank 0; return its ``over``: whether nothing is left to do."""
        record = self.threads.record if self.threads else {}
        facts = over, record
        whole, self._loaded = self._loaded, None
        (over, record), self.at = synchronize(self.step, self.at, facts, self.communicator, whole)
        if self.threads:
            self.threads.record = record
        at = self.at
        self._completed = at.epoch, at.batch, at.draws
        if self.outer:
            self.outer.begin(at.update)
        self.communicator.note(at.update)
        self._health = self.optimizer.state.read()
        return over
