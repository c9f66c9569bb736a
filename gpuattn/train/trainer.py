"""The loop: packed batches, loss, gradients into the flat workspace, optimizer, evaluation, saving.

What happens at update n is a function of the config and n, so that a run that was stopped, even by
force, goes on bit for bit (NumPy, and a GPU with ``deterministic``; runs given as seconds aside,
which go by the clock).
"""

import contextlib
import dataclasses
import functools
import gc
import time
from operator import call

import numpy as np

from gpuattn.arrays import keep_freed_memory
from gpuattn.autodiff import tape
from gpuattn.errors import CheckpointError, DataError, MemoryLimitError
from gpuattn.gemm.tuning import tune
from gpuattn.ops.update.gradient_statistics import read_state
from gpuattn.optim import OPTIMIZERS, AdamW, ExponentialAverage, Schedule
from gpuattn.runs.metrics import is_right, rank
from gpuattn.runtime import checkpoint, precision
from gpuattn.runtime.device import array_module, is_out_of_memory, memory_in_use
from gpuattn.runtime.feed import DeviceFeed, HostFeed
from gpuattn.runtime.graphs import Calls, Replays
from gpuattn.runtime.readback import Reading
from gpuattn.runtime.workspace import Workspace
from gpuattn.train import memory
from gpuattn.train.meter import Meter
from gpuattn.train.progress import Progress
from gpuattn.train.state import Position
from gpuattn.train.threads import BlasThreads

REPORT_UPDATES = 20  # between reports
RIGHT = 2  # evaluations in a row that reach ``until`` end a run


class Trainer:
    """Trains the model of a ``tasks.task.Task`` as its config says.

    ``device``: "numpy" or "cuda". ``report``: a ``train.progress.Report``. ``graphs``: whether a
    GPU gets each update as CUDA graphs (the bits are the same). ``at``: the Position.
    """

    def __init__(self, task, device, report, graphs=True):
        self.task, self.report = task, report
        self.model, self.corpus = task.model, task.corpus
        self.config = self.whole = config = task.config  # ``whole``: before batches are cut
        self.xp = array_module(device)
        if device == "numpy":
            keep_freed_memory()
        for _, module in self.model.modules():
            module.deterministic = config.deterministic
        self.precision = precision.choose(config.precision, device)
        optimizer = OPTIMIZERS[config.optimizer]
        betas = {"betas": (0.9, config.beta2)} if issubclass(optimizer, AdamW) else {}
        self.workspace = Workspace(
            self.model, device, self.precision.dtype, self.precision.grad_dtype(config.accumulate),
            moments=optimizer.moments, masters=self.precision.masters,
        )  # fmt: skip
        self.optimizer = optimizer(
            self.workspace, weight_decay=config.weight_decay, max_norm=config.clip or None,
            loss_scale=self.precision.loss_scale, growth_interval=self.precision.growth_interval,
            seed=config.seed, **betas,
        )  # fmt: skip
        self.average = ExponentialAverage(self.workspace, config.ema) if config.ema else None
        total = config.lr_decay or (config.length.amount if config.length.unit == "u" else None)
        self.schedule = Schedule(config.schedule, config.lr, config.warmup, total, config.lr_floor)
        self.at = Position(data=self.corpus.fingerprint)
        self._batches, self._completed = None, (0, 0, 0)
        self._graphs, self._stream, self._is_computing = graphs, None, False
        if device != "numpy":
            self._stream = self.xp.cuda.Stream(non_blocking=True)  # the usual one has no graphs
        self.threads = BlasThreads(config.threads, self._probe) if device == "numpy" else None
        self._start_engine()
        self.meter = Meter(self.xp, self.precision.dtype, task.flops)
        self._loss = self.xp.zeros((), "float32")  # summed over the tokens since the last report
        self._valid = self.xp.zeros((), "float32")
        self._since = [0, 0]  # updates, target tokens
        self._noted = None  # what the next report says, as soon as it has come from the device
        self._health = self.optimizer.state.read()

    def _start_engine(self):
        """Set what feeds the steps and what calls them, anew."""
        self.feed = self.steps = None
        first = call if self.config.deterministic else tune
        if self._stream is None:
            self.feed, self.steps = HostFeed(), Calls(first)
            return
        with self._stream:
            say = functools.partial(self.report.say, "graphs")
            self.feed = DeviceFeed(self.task.fixed_shape)
            self.steps = Replays(say, first) if self._graphs else Calls(first)

    # ---- the run ----

    def run(self, stop, evaluate, save):
        """Train until the length is reached, patience is lost or ``stop()`` says so.

        ``evaluate()`` returns a row of metrics, or None when stopped meanwhile. ``save(row)`` keeps
        the run after an evaluation, ``save(None)`` at a stop.
        Returns whether the run is over (False: stopped).
        Raises FloatingPointError, after ``save(None)``, when gradients are not finite for long.
        """
        with self.computing():
            try:
                return self._run(stop, evaluate, save)
            except FloatingPointError as error:
                raise FloatingPointError(f"{error}. {_saved(save)}") from error

    @contextlib.contextmanager
    def computing(self):
        """Compute on the stream of the steps inside a block; what is outside waits, both ways.

        All that reads or writes what the steps do belongs inside: the stream waits for no other.
        On NumPy, BLAS threads are those of the run until the end of the outermost block.
        """
        if self._is_computing:
            yield
            return
        self._is_computing = True
        try:
            place = self.threads.kept() if self._stream is None else self._on_stream()
            with place, np.errstate(all="ignore"):  # ``precision.trouble`` finds inf and NaN
                yield
        finally:
            self._is_computing = False

    @contextlib.contextmanager
    def _on_stream(self):
        self.xp.cuda.Device().synchronize()
        with self._stream:
            yield
        self._stream.synchronize()

    def _run(self, stop, evaluate, save):
        begin = time.perf_counter() - self.at.seconds
        if self.threads:
            self.threads.restart()
        self.meter.restart()
        self._reported = time.perf_counter()
        while True:
            short = None
            try:
                if self.threads:
                    self.threads.next(self.at.update)
                # First of all: a run that was stopped before an evaluation that was due has it now.
                if self._due() and not self._evaluate(stop, evaluate, save):
                    return False
                if self._reached_end():
                    if not self.at.finished:  # its time was over with the end of an evaluation
                        self.at.finished = self.config.length.describe()
                        save(None)
                    return True
                self.at.seconds = time.perf_counter() - begin
                self._update()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                short = str(error)  # only this: the error holds the arrays of the step
            if short is not None:
                self._make_room(short, save)
                continue
            self.at.seconds = time.perf_counter() - begin
            if self._since[0] >= REPORT_UPDATES or time.perf_counter() - self._reported > 2:
                self._note()
            self._tell()
            if stop():
                save(None)
                return False

    def _make_room(self, short, save):
        """Go on from the last whole update with batches in smaller parts, or save and give up."""
        at = self.at
        at.epoch, at.batch, at.draws = self._completed
        self._loss[...] = 0
        self._since, self._noted = [0, 0], None
        self.meter.restart()
        if self.average:
            self.average.updates = at.averaged
        parts = memory.next_parts(self.whole, at.parts)
        if parts is None:
            self._use_parts(at.parts)  # frees what the steps held
            save(None)
            raise MemoryLimitError(memory.nothing_smaller(self.config, at.update, short))
        batches = self.corpus.loader(at.epoch).batches(at.epoch)
        self._use_parts(parts)
        at.batch = at.batch * self.corpus.loader(at.epoch).batches(at.epoch) // batches
        self._completed, at.parts = (at.epoch, at.batch, at.draws), parts
        config = self.config
        self.report.say(
            "memory", f"used up ({short}). Going on from update {at.update:,} with batches of "
            f"{config.batch:,} tokens, {config.accumulate} an update",
        )  # fmt: skip

    def _use_parts(self, parts):
        """Cut each batch into so many, and free what belongs to others."""
        self.task.rebatch(memory.in_parts(self.whole, parts))
        self.config, self._batches = self.task.config, None
        if self._stream is not None:
            self._stream.synchronize()
        dtype = self.precision.grad_dtype(self.config.accumulate)
        if self.workspace.grads.dtype != dtype:
            self.workspace.keep_gradients_in(dtype)
        self._start_engine()
        gc.collect()
        if self._stream is not None:
            self.xp.get_default_memory_pool().free_all_blocks()

    def _evaluate(self, stop, evaluate, save):
        """Evaluate and save; return False when stopped meanwhile with updates to come."""
        self._note()
        self._tell(wait=True)
        begin = time.perf_counter()
        row = evaluate()
        if row is None:
            save(None)
            return False
        at = self.at
        at.evaluated = [at.update, at.epoch, at.seconds]
        at.evaluation = time.perf_counter() - begin
        at.seconds += at.evaluation  # a run of a given time may be over with it
        if at.best is None or rank(row) > rank(at.best):
            at.best, at.worse = row, 0
        else:
            at.worse += 1
        until = self.config.until
        at.right = at.right + 1 if until and is_right(row, until) else 0
        if 0 < self.config.patience <= at.worse:
            at.finished = f"no better evaluation in {at.worse}"
        elif at.right == RIGHT:
            at.finished = f"{until:g} % exact of every kind in {RIGHT} evaluations in a row"
        elif self._reached_end():
            at.finished = self.config.length.describe()
        at.early = bool(at.finished) and at.finished != self.config.length.describe()
        save(row)
        self.meter.restart()
        self._reported = time.perf_counter()
        at.evaluation = self._reported - begin
        return self._reached_end() or not stop()

    def share(self):
        """Return how much of the run is done, 0 to 1. Of a time, the last evaluation is a part."""
        at, (amount, unit) = self.at, self.config.length
        if unit == "e":
            done = at.epoch
            if at.batch:
                done += at.batch / self.corpus.loader(at.epoch).batches(at.epoch)
        else:
            done = at.update if unit == "u" else at.seconds
        if unit == "s":
            amount -= min(at.evaluation * (2 if self.config.average > 1 else 1), amount / 2)
        return min(1.0, done / amount)

    def _reached_end(self):
        return bool(self.at.finished) or self.share() >= 1

    def _due(self):
        """Tell whether an evaluation is to be made of the parameters as they are."""
        at = self.at
        if at.update == at.evaluated[0]:
            return False
        return self._reached_end() or at.is_evaluation_due(self.config)

    # ---- an update ----

    def _update(self):
        """Take ``accumulate`` batches, fewer at the end of a run, and update the parameters once.

        Each batch counts by its target tokens. The weights are shares of the budget, near one, so
        that 16-bit gradients stay in range.
        """
        config, at = self.config, self.at
        rate = self.schedule(at.update, None if self.schedule.total else self.share())
        share = self.average.next_share() if self.average else 0
        tokens = 0
        for turn in range(config.accumulate):
            batch = self._next_batch()
            tokens += batch.target_tokens
            self.feed.load(
                batch, weight=batch.target_tokens / config.batch, tokens=batch.target_tokens,
                draw=at.draws, learning_rate=rate, divisor=tokens / config.batch, share=share,
            )  # fmt: skip
            at.draws += 1
            self.meter.batches.append(batch)
            more = turn > 0
            step = functools.partial(self._gradients, more)
            self.steps("more gradients" if more else "gradients", self.feed.shape, step)
            if self.share() >= 1:
                break
        self.steps("update", None, self._apply)
        at.update += 1
        at.tokens += tokens
        at.averaged = self.average.updates if self.average else 0
        self._completed = at.epoch, at.batch, at.draws
        self._since[0] += 1
        self._since[1] += tokens

    # What follows are the steps that become graphs: nothing in them may differ between calls but
    # what they read on the device.

    def _gradients(self, more):
        """Write the gradients of the batch, or with ``more`` add them to those before."""
        numbers = self.feed.numbers
        if not more:
            self.workspace.begin()
        self.model.random.step = numbers.draw.reshape(1)
        dloss = self.precision.root_gradient(self.optimizer.state) * numbers.weight
        loss = self.task.loss(self.feed.batch, self.config.label_smoothing, dloss)
        self.workspace.backward(loss, dloss)
        self._loss += loss.data * numbers.tokens

    def _apply(self):
        numbers = self.feed.numbers
        self.workspace.finish()
        self.optimizer.step(numbers.learning_rate, numbers.divisor)
        if self.average:
            self.average.update(numbers.share)

    def _probe(self):
        """Compute the gradients of the batch that comes next; nothing of it is kept."""
        at, before = self.at, self._loss.copy()
        batch = next(self.corpus.loader(at.epoch).epoch(at.epoch, at.batch))
        weight = batch.target_tokens / self.config.batch
        self.feed.load(batch, weight=weight, tokens=batch.target_tokens, draw=at.draws)
        self._gradients(False)
        self._loss[...] = before

    def look(self, at):
        """Return ``at(update, again)``, called where updates compute, which is a stream on a GPU.

        ``update()`` takes one; ``again()`` computes that of the last batch once more, as a run's
        CUDA graphs do. For who wants to time them.
        """

        def again():
            self._gradients(False)
            self._apply()

        with self.computing():
            return at(self._update, again)

    def _next_batch(self):
        at = self.at
        loader = self.corpus.loader(at.epoch)
        if self._batches is None:
            self._batches = loader.epoch(at.epoch, at.batch)
        batch = next(self._batches)
        at.batch += 1
        if at.batch == loader.batches(at.epoch):
            at.epoch, at.batch, self._batches = at.epoch + 1, 0, None
        return batch

    def _note(self):
        """Let what a report says come to the host, while the GPU goes on."""
        updates, tokens = self._since
        if not updates:
            return
        self._tell(wait=True)
        share = self.share()
        held = self.steps.held_bytes() if isinstance(self.steps, Replays) else 0
        left = self.at.seconds * (1 - share) / share if share else float("inf")
        facts = {
            "update": self.at.update, "epoch": self.at.epoch, "seconds": self.at.seconds,
            "share": share, "eta": left, "memory": memory_in_use(self.xp) + held,
            "at_most": bool(self.config.until or self.config.patience),
            **self.meter.facts(updates, self.at.spent),
        }  # fmt: skip
        if self.threads:
            self.threads.observe(facts["rate"])
        self._noted = Reading(self._loss, self.optimizer.state.array), tokens, facts
        self._loss[...] = 0
        self._since = [0, 0]
        self._reported = time.perf_counter()

    def _tell(self, wait=False):
        """Report what was noted, if it has come by now (or ``wait`` for it)."""
        if not self._noted or not (wait or self._noted[0].ready()):
            return
        reading, tokens, facts = self._noted
        (loss, state), self._noted = reading.values(), None
        before, self._health = self._health, read_state(state)
        for sentence in precision.trouble(before, self._health, self.workspace, self.config):
            self.report.say("warning", sentence)
        facts |= {"loss": float(loss) / tokens, "learning_rate": self._health["learning_rate"]}
        self.report.progress(Progress(**facts))

    def valid_loss(self, batches=None):
        """Return the mean cross-entropy per target token of ``batches``, unsmoothed.

        By default those of validation, all of them. To be called while the run evaluates.
        """
        tokens = 0
        self._valid[...] = 0
        with self.model.evaluating():
            for batch in self.corpus.valid_batches() if batches is None else batches:
                tokens += batch.target_tokens
                self.feed.load(batch, tokens=batch.target_tokens)
                self.steps("valid", self.feed.shape, self._add_loss)
        return float(self._valid) / tokens

    def _add_loss(self):
        self._valid += tape.raw(self.task.loss(self.feed.batch)) * self.feed.numbers.tokens

    # ---- saving ----

    def state(self):
        """Return ({name: array}, JSON-able metadata) of everything a continuation needs."""
        tensors = self.workspace.state_dict()
        tensors["optimizer_state"] = self.optimizer.state.array
        if self.average:
            tensors["average"] = self.average.average
        return tensors, dataclasses.asdict(self.at)

    def load(self, folder):
        """Go on from the state in a run folder. CheckpointError if it is damaged or another's."""
        expected, _ = self.state()
        tensors, at = checkpoint.load(folder, "state", expected)
        try:
            at = Position(**at)
        except TypeError as error:
            raise CheckpointError(f"the state in {folder} is of another version") from error
        if at.data != self.corpus.fingerprint:
            raise DataError(
                f"the training text is not the one that {folder} began with, so the run cannot go "
                "on. Put the text back, or use another --out"
            )
        self.at, self._completed = at, (at.epoch, at.batch, at.draws)
        if at.parts > 1:
            self._use_parts(at.parts)
        self.optimizer.state.array[...] = self.xp.asarray(tensors.pop("optimizer_state"))
        if self.average:
            self.average.average[...] = self.xp.asarray(tensors.pop("average"))
            self.average.updates = self.at.averaged
        self.workspace.load_state_dict(tensors)
        self._health = self.optimizer.state.read()


def _saved(save):
    """Save, and return a sentence about it: parameters with inf or NaN are never written."""
    try:
        save(None)
    except CheckpointError as error:
        return f"Nothing newer was saved: {error}"
    return "All is saved as it was then"
