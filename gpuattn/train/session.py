"""A training run, from options to a run folder: begin or continue, evaluate, save, end."""

import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuattn.arrays import check_indices
from gpuattn.data.store import CheckBeside
from gpuattn.files import write_text
from gpuattn.parallel.agreement import together
from gpuattn.parallel.communicator import Communicator
from gpuattn.parallel.dealing import Dealing
from gpuattn.report.page import write_page
from gpuattn.runs import events
from gpuattn.runs.config import TrainConfig, default_batch, describe_growth, to_toml
from gpuattn.runs.damage import check_whole
from gpuattn.runs.fine_tuning import freeze, load_origin, with_dropout
from gpuattn.runs.folder import RunFolder, begin_from
from gpuattn.runs.metrics import describe, rank
from gpuattn.runtime import checkpoint
from gpuattn.runtime.cold_start import InBackground, start_libraries
from gpuattn.runtime.device import card_memory, choose_device, installed_version, versions
from gpuattn.runtime.precision import choose
from gpuattn.tasks.registry import task_of
from gpuattn.train import memory
from gpuattn.train.averaging import evaluated_with
from gpuattn.train.follower import Terms, agree, follow, lead
from gpuattn.train.progress import Listener
from gpuattn.train.rehearsal import rehearse_evaluation
from gpuattn.train.state import Outcome, arrays_of, tensors_of, weights_of
from gpuattn.train.trainer import ALONE, Trainer
from gpuattn.units import AUTO

SHOWN_CHARACTERS = 80  # of a sample text


def train(
    config: TrainConfig, out: str | Path, *, origins: dict[str, str] | None = None,
    device: str = "auto", listener: Listener | None = None,
    stop: Callable[[], bool] | None = None, overwrite: bool = False, graphs: bool = True,
    command: str | None = None, tensorboard: bool = False, communicator: Communicator = ALONE,
    shard: str = "auto",
) -> Outcome:  # fmt: skip
    """Train as a TrainConfig says into the folder ``out``; continue a run that was stopped there.

    ``origins``: {option: where its value came from}, written beside the options. ``device``:
    "auto", "cuda" or "numpy". ``listener``: a ``train.progress.Listener``. ``stop``: called after
    each update; when it returns True, the run is saved and left. ``overwrite``: delete a run that
    is in the folder. ``graphs``: see ``Trainer``. ``command``: the command line, for the report.
    ``tensorboard``: also write the metrics as TensorBoard events; see ``runs.events``.
    ``communicator``: of the ranks that train together, each of which calls this. Rank 0 alone reads
    and writes the folder, and calls its listener. ``shard``: one of ``sharding.SHARD``, whether
    ranks of a host share masters, moments and averages among them.
    Returns an Outcome.
    Raises ConfigError when the folder has a run with other options, DataError for data that cannot
    be used, CheckpointError when a damaged run cannot continue or the disk is full,
    DeviceMissingError, UnsupportedError for ``tensorboard`` without the package of that name, and
    FloatingPointError when gradients are not finite for long.
    """
    if tensorboard:
        events.import_tensorboard()
    listener, stop = listener or Listener(), stop or (lambda: False)
    terms = agree(config, device, communicator, shard)
    if communicator.rank:
        return follow(config, stop, listener, communicator, terms, graphs)
    folder = RunFolder(out)
    with contextlib.ExitStack() as held:

        def opened():
            held.enter_context(folder.lock())
            return _open(
                config, folder, device, listener, overwrite, graphs, command, communicator, terms
            )

        session, begun = together(communicator, opened)
        lead(session.task, communicator)
        _write(session, begun, config, origins)
        with events.written(folder) if tensorboard else contextlib.nullcontext():
            return session.run(stop)


def _open(config, folder, device, listener, overwrite, graphs, command, communicator, terms):
    """Return the Session of a new run or of the one in the folder, and whether it is the latter."""
    if overwrite or not folder.exists():
        folder.check_init(config)
    if overwrite:
        folder.remove()
    begun = folder.exists()
    if begun and config.batch == AUTO:
        config = dataclasses.replace(config, batch=folder.config().batch)
    if begun:
        folder.check_trainable()
        folder.check_same(config)
        for sentence in check_whole(folder):
            listener.say("warning", sentence)
    else:
        folder.check_empty()
    device, where = choose_device(device)
    if device == "cuda":
        start_libraries(choose(config.precision, device).dtype)
    listener.say("device", where)
    noted = {"where": where.removesuffix(", as asked"), "command": command}
    session = Session(config, folder, device, listener, begun, graphs, noted, communicator, terms)
    return session, begun


def _write(session, begun, config, origins):
    """Write the files of a new run, or what is new in those of an old one. ``config``: as given."""
    folder, listener = session.folder, session.listener
    if config.batch == AUTO and begun:
        config = dataclasses.replace(config, batch=session.config.batch)
    if not begun:
        if config.batch == AUTO:
            config, origins = session.config, {**(origins or {}), "batch": AUTO}
        folder.create(
            config, origins, session.task.corpus.tokenizer, session.digests, session.task.model
        )
    else:
        folder.keep_digests(session.digests)
        if (old := folder.config()) != config:  # another length, or other names of files
            write_text(folder.path / "config.toml", to_toml(config, origins))
        if old.length != config.length:
            listener.say("run", describe_growth(old, config))


class Session:
    """The parts of one run; see ``train``. ``noted``: facts for the first row of its log."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, device: str, listener: Listener, begun: bool,
        graphs: bool = True, noted: dict[str, Any] | None = None,
        communicator: Communicator = ALONE, terms: Terms | None = None,
    ) -> None:  # fmt: skip
        self.terms = terms or Terms(device, None, None)
        self.folder, self.listener, fits = folder, listener, config.batch == AUTO
        self.noted = noted or {}
        if not config.origin:
            memory.check_host(config, device)
        if fits:
            tokens = max(default_batch(config, device), memory.least_tokens(config))
            config = dataclasses.replace(config, batch=tokens)
        owner = folder if begun else config.init_from and RunFolder(config.init_from)
        say = functools.partial(listener.say, "data")
        model, tokenizer = None, owner.tokenizer() if owner else None
        if config.origin:
            if begun and checkpoint.generations(folder.path, "state"):
                model = folder.new_model(config, tokenizer).train()
            else:  # also after a kill before the first save
                model, tokenizer = load_origin(config)
                self.noted["from"] = config.origin
            model = with_dropout(model, config)
        self.task = task_of(config)(config, tokenizer, say, model)
        corpus = self.task.corpus
        self.digests = dict(corpus.digests)
        figures = corpus.store.figures() if corpus.store else None
        self.noted["data"] = {"facts": corpus.facts, "figures": figures}
        if folder.needs_init(config):
            weights, self.digests["init_from"] = begin_from(config, self.task.model)
            self.noted["init_from"] = {"weights": weights, "sha256": self.digests["init_from"]}
        if begun:
            folder.check_data(config, self.digests)
        if config.freeze:
            freeze(self.task.model, config.freeze)
        if device == "cuda":
            config = self._plan_memory(config, fits)
        self.config = config
        logged = _Logged(listener, folder.metrics)
        sharing = self.terms.sharing
        self.trainer = Trainer(self.task, device, logged, graphs, communicator, sharing)
        self._compiling = None
        if device == "cuda" and not folder.metrics.read("end"):  # else it may be finished
            self._compiling = InBackground(functools.partial(rehearse_evaluation, self.task))
            self.trainer.rehearse()
        if self.trainer.threads:
            self._record_threads(self.trainer.threads)
        self._introduce()
        if begun and checkpoint.generations(folder.path, "state"):
            with self.trainer.computing():
                self.trainer.load(folder.path)

    def _plan_memory(self, config, fits):
        """Tell how much GPU memory the run needs, and return the config.

        ``fits``: choose the largest batch that fits.
        """
        task, (free, card) = self.task, card_memory()
        free = free if self.terms.free is None else min(free, self.terms.free)
        parts = self.terms.sharing.parts if self.terms.sharing else 1
        precision = choose(config.precision, "cuda")
        memory.check_fits(task.model, config, precision, free, parts)
        if fits:
            epoch = task.corpus.epoch_tokens()
            tokens = memory.fit(task.model, config, precision, free, epoch, parts)
            config = dataclasses.replace(config, batch=tokens)
            task.rebatch(config)
        plan = memory.plan(task.model, config, precision, parts=parts)
        self.listener.say("memory", plan.describe(card, free))
        return config

    def _record_threads(self, threads):
        """Read the choices of BLAS threads from the log, and append new ones."""
        log, say = self.folder.metrics, self.listener.say
        for row in log.read("threads"):  # a row replaces choices for later updates
            kept = {u: number for u, number in threads.record.items() if u < row["update"]}
            threads.record = kept | {row["update"]: row["threads"]}

        def note(update, number, sentence):
            log.add("threads", update=update, seconds=self.trainer.at.seconds, threads=number)
            say("threads", sentence)

        threads.on_choice = note
        blas = self.noted["blas"] = threads.describe()
        before = [row["blas"] for row in log.read("start") if "blas" in row]
        if before and before[-1] != blas:
            say(
                "warning", f"products were computed by {before[-1]}, now by {blas}: bits may "
                "differ from those of an uninterrupted run",
            )  # fmt: skip

    def run(self, stop: Callable[[], bool]) -> Outcome:
        """Train to the end or until ``stop()`` returns True; return the Outcome.

        The parts of a store are compared with their digests meanwhile. Raises DataError after the
        update at which one is found damaged, and saves nothing more.
        """
        try:
            with self.trainer.computing(), self.trainer.saves, self._checked(stop) as stop:
                return self._run(stop)
        finally:
            if self._compiling:
                self._compiling.wait()

    @contextlib.contextmanager
    def _checked(self, stop):
        """Return a context with a ``stop`` that raises what is found wrong with the store."""
        store = self.task.corpus.store
        if store is None:
            yield stop
            return
        with CheckBeside(store) as check:
            yield lambda: check.poll() or stop()

    def _run(self, stop):
        at, trainer = self.trainer.at, self.trainer
        self.listener.begin()
        if not at.early and at.finished != self.config.length.describe():
            at.finished = ""  # the length is greater than before
        if trainer.begin(over=bool(at.finished and self.folder.metrics.read("end"))):
            before = f"finished before, after {at.update:,} updates ({at.finished})"
            self.listener.say("run", before)
            return Outcome(True, at.best, at.update)
        self.folder.metrics.rewind(at.update)
        if at.update:
            self.listener.say("run", f"continuing from update {at.update:,} in {self.folder.path}")
        self.folder.metrics.add(
            "start", update=at.update, device=trainer.xp.__name__, **self.noted,
            versions=versions(), date=datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds"),
        )  # fmt: skip
        if trainer.sharing is None and trainer.outer is None:  # else ``arrays`` copies them
            trainer.saves.prepare(arrays_of(trainer.step))
        over = trainer.run(stop, lambda: self._evaluate(stop), self._save)
        trainer.saves.wait()
        if not over or (self.config.average > 1 and not self._average(stop)):
            self.folder.metrics.add("stop", update=at.update, seconds=at.seconds)
            return Outcome(False, at.best, at.update)
        trainer.meter.energy(at.spent, now=True)
        self.folder.metrics.add(
            "end", update=at.update, seconds=at.seconds, best=at.best, spent=at.spent
        )
        if at.early:
            self.listener.say("ended", f"{at.finished}, after {at.update:,} updates")
        elif self.config.until:
            wanted = f"{self.config.until:g} % exact of every kind"
            text = f"{at.finished} ended before {wanted}; continue with a longer --for"
            self.listener.say("ended", text)
        self.listener.say("trained", trainer.meter.describe(at.spent, at.seconds))
        try:
            self.listener.say("report", str(write_page(self.folder.path)))
        except OSError as error:  # the run itself is saved
            self.listener.say("warning", f"report.html cannot be written: {error.strerror}")
        return Outcome(True, at.best, at.update)

    def _introduce(self):
        config, corpus, say = self.config, self.task.corpus, self.listener.say
        say("gpuattn", f"{installed_version()}, {self.trainer.precision.name}")
        for fact in corpus.facts:
            say("data", fact)
        model, tokenizer = self.task.model, corpus.tokenizer
        learnt = sum(parameter.size for parameter in model.parameters())
        size = sum(tensor.size for _, tensor in model.named_tensors())
        frozen = f", {(size - learnt) / 1e6:.2f} M of them frozen" if size > learnt else ""
        say("model", f"{self.task.describe_model()}, {len(tokenizer):,} {tokenizer.units}, "
            f"{size / 1e6:.2f} M parameters{frozen}")  # fmt: skip
        batches = f" in {config.update_batches} batches" if config.update_batches > 1 else ""
        length = f"for {config.length.describe()}"
        if config.until:
            length = f"until {config.until:g} % of every kind is exact, {config.length.most()}"
        say("update", f"{self.task.describe_update()}{batches}, {length}")
        if "init_from" in self.noted:
            say("begins", f"with {self.noted['init_from']['weights']}")
        if "from" in self.noted:
            say("begins", f"with the model of {self.noted['from']}")
        ranks = self.trainer.communicator
        if ranks.size > 1:
            self.noted["ranks"] = ranks.size
            each = config.replicas // ranks.size
            say("ranks", f"{ranks.size}, {ranks.local_size} of them on this host; each computes "
                f"{each} of {config.replicas} replicas")  # fmt: skip
        say("folder", str(self.folder.path))
        for sentence in corpus.warnings:
            say("warning", sentence)

    # ---- evaluating ----

    def _evaluate(self, stop, **noted):
        """Return a row of metrics of the parameters or their moving average, None if stopped."""
        at, trainer = self.trainer.at, self.trainer
        if self._compiling:
            self._compiling.wait()
        check_indices()
        with trainer.average.applied() if trainer.average else contextlib.nullcontext():
            row = {"update": at.update, "epoch": at.epoch, "seconds": at.seconds,
                   "loss": trainer.valid_loss(), **noted}  # fmt: skip
            deal = Dealing(trainer.evaluating_ranks, stop)
            answers = self.task.answers(self.task.user, deal)
        if deal.stopped:
            return None
        valid = self.folder.path / "valid"
        figures, texts = self.task.judge(answers, valid, at.update, row["loss"])
        row |= figures
        self.folder.metrics.add("valid", **row)
        self.listener.say("valid", describe(row))
        for text in texts:
            self.listener.say("", _clipped(text))
        return row

    # ---- saving ----

    def _save(self, row):
        """Begin to save the weights as ``last``, and as ``best`` if they are; then the state.

        ``row``: their evaluation, or None at a stop, which waits until all is saved.
        """
        path, trainer, average = self.folder.path, self.trainer, self.config.average
        at = dataclasses.asdict(trainer.at)
        is_best = row is not None and trainer.at.best is row

        def write(arrays):  # a kill at any place leaves a run that continues: the state is last
            weights = weights_of(trainer.step, arrays)
            if is_best:
                checkpoint.save(path, "best", weights, row)
            checkpoint.save(path, "last", weights, row or {"update": at["update"]})
            if row is not None and average:
                self.folder.save_snapshot(at["update"], weights, average)
            checkpoint.save(path, "state", tensors_of(trainer.step, arrays), at)

        trainer.saves.begin(trainer.arrays(), write)
        if row is None:
            trainer.saves.wait()

    def _average(self, stop):
        """Evaluate the mean of the last checkpoints, and save it as ``best`` if it is.

        Returns False when stopped meanwhile.
        """
        at, workspace, last = self.trainer.at, self.trainer.workspace, self.config.average

        def load():
            workspace.load_weights(self.folder.average_snapshots(last))

        def evaluate():
            row = self._evaluate(stop, averaged=last)
            if row is not None and rank(row) > rank(at.best):
                at.best = row
                checkpoint.save(self.folder.path, "best", workspace.weights(), row)
            return row

        return evaluated_with(self.trainer, evaluate, load) is not None


class _Logged(Listener):
    """Writes progress to the metrics, then tells another listener."""

    def __init__(self, listener, metrics):
        self.say, self._inner, self._metrics = listener.say, listener, metrics

    def progress(self, progress):
        row = {name: value for name, value in progress._asdict().items() if value is not None}
        del row["eta"], row["share"], row["at_most"], row["counted"]
        self._metrics.add("train", **row)
        self._inner.progress(progress)


def _clipped(text):
    """Return a text cut to one line: early translations repeat a word many times."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
