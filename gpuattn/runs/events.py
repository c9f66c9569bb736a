"""Rows of a run's metrics as TensorBoard events. Needs the package tensorboard."""

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuattn.errors import UnsupportedError
from gpuattn.files import writing

FOLDER = "tensorboard"  # in a run's
TAGS = {
    "loss": "loss", "rate": "tokens_per_second", "milliseconds": "milliseconds_per_update",
    "learning_rate": "learning_rate", "mfu": "mfu", "watts": "watts", "bleu": "bleu",
    "chrf": "chrf", "exact_match": "exact_match", "perplexity": "perplexity",
}  # fmt: skip
FLUSH_SECONDS = 2


def import_tensorboard() -> tuple[Any, Any, Any]:
    """Return the classes Event, SessionLog and EventFileWriter of the package tensorboard.

    Raises UnsupportedError where it is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UnsupportedError(
            "--tensorboard needs the package tensorboard, which is not installed: "
            "pip install 'gpuattn[tensorboard]'"
        ) from error
    return Event, SessionLog, EventFileWriter


@contextlib.contextmanager
def written(run: Any) -> Iterator[None]:
    """Write the rows of a RunFolder's metrics as events: the rows that exist, and those added in
    the block.

    Raises UnsupportedError without tensorboard, CheckpointError when writing fails.
    """
    log = run.metrics.listener = EventLog(run.path / FOLDER)
    try:
        yield
        if not log.begun:  # a resumed run that had ended
            log.begin(run.metrics.read())
    finally:
        run.metrics.listener = None
        log.close()


class EventLog:
    """Keeps a folder with the rows of metrics as events, which a thread writes.

    Scalars are "train/loss", "valid/loss" and so on, see TAGS, by update; "averaged/loss" and so on
    are of the mean of the last checkpoints. The time of an event is when its update was, by the
    date of the last start and the seconds of training since.
    """

    def __init__(self, folder: Path) -> None:
        self._event, self._session, self._new_writer = import_tensorboard()
        self._folder = folder
        self._writer: Any = None

    @property
    def begun(self) -> bool:
        return self._writer is not None

    def begin(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows into a new file and empty older ones, so that no update is there twice.

        An open TensorBoard drops what it has read of those, and could not go on from deleted ones.
        """
        self.close()
        self._started, self._begin, self._seconds = 0.0, 0.0, 0.0
        with writing(self._folder):
            for path in self._folder.glob("events.out.tfevents.*"):
                path.write_bytes(b"")
            self._writer = self._new_writer(str(self._folder), flush_secs=FLUSH_SECONDS)
            start = self._session(status=self._session.START)
            self._writer.add_event(self._event(step=0, session_log=start))
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row of metrics, if it is of "train" or "valid"."""
        if row["event"] == "start":
            self._started = datetime.datetime.fromisoformat(row["date"]).timestamp()
            self._begin = self._seconds
        self._seconds = row.get("seconds", self._seconds)
        if row["event"] not in ("train", "valid"):
            return
        part = "averaged" if "averaged" in row else row["event"]
        event = self._event(
            step=row["update"], wall_time=self._started + self._seconds - self._begin
        )
        for name, tag in TAGS.items():
            if name in row:
                event.summary.value.add(tag=f"{part}/{tag}", simple_value=row[name])
        with writing(self._folder):
            self._writer.add_event(event)

    def close(self) -> None:
        """Write what is not written yet."""
        if self.begun:
            with writing(self._folder):
                self._writer.close()
