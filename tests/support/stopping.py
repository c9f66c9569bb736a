"""Stop or kill training runs, and compare their results with those of uninterrupted runs."""

import os
import subprocess
import sys
import time
from pathlib import Path

from gpuattn.runs.config import to_toml
from gpuattn.runs.metrics import MetricsLog
from gpuattn.runtime import checkpoint

ROOT = Path(__file__).parents[2]
CLOCKED = ("seconds", "tokens_per_second")  # these differ between any two runs


class After:
    """A function that returns True (stop) from its ``calls``-th call on."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self):
        self.left -= 1
        return self.left <= 0


def assert_same_bits(one, other, names=("state", "last", "best")):
    for name in names:
        a, b = (checkpoint.load(path, name)[0] for path in (one, other))
        assert a.keys() == b.keys()
        different = [key for key in a if a[key].tobytes() != b[key].tobytes()]
        assert different == [], name


def assert_same_metrics(one, other):
    """Assert that both runs recorded the same evaluations, each once, with the same metrics."""
    rows = [MetricsLog(Path(path) / "metrics.jsonl").read("valid") for path in (one, other)]
    a, b = ([{key: row[key] for key in row if key not in CLOCKED} for row in each] for each in rows)
    assert a == b


class Training:
    """``gpuattn train`` in another process, which imports everything and waits for ``begin``.

    ``lines``: Python code to run before training.
    """

    def __init__(self, config, out, device="numpy", lines=""):
        self.out = Path(out)
        options = self.out.with_suffix(".toml")
        options.write_text(to_toml(config))
        code = (
            "import sys, gpuattn.cli.train\n"
            "from gpuattn.cli.main import main\n"
            f"{'import cupy; cupy.zeros(1)' if device == 'cuda' else ''}\n{lines}\n"
            "if sys.stdin.readline():\n    main(sys.argv[1:])\n"
        )
        command = [sys.executable, "-c", code, "train", "--config", options, "--out", self.out,
                   "--device", device]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip

    def begin(self):
        self.process.stdin.write("begin\n")
        self.process.stdin.flush()

    def wait_for_state(self, number, seconds=60):
        """Wait until the state was saved ``number`` times, by any process."""
        deadline = time.monotonic() + seconds
        while saves(self.out) < number:
            assert self.process.poll() is None and time.monotonic() < deadline, self.end()
            time.sleep(0.001)

    def wait_for_save(self):
        """Wait until a file is being written."""
        while not any(self.out.glob(".*.tmp")):
            assert self.process.poll() is None, self.end()

    def kill(self):
        """Kill the process (SIGKILL); return whether it was saving a file."""
        self.process.kill()
        self.process.communicate()
        return bool(list(self.out.glob(".*.tmp")))

    def end_by(self, number, again=20):
        """Send a signal; return as ``end`` does.

        Sends it again after ``again`` seconds: CPython handles a signal that arrives right before
        a system call blocks only when the next one interrupts that call.
        """
        self.process.send_signal(number)
        try:
            self.process.wait(again)
        except subprocess.TimeoutExpired:
            self.process.send_signal(number)
        return self.end()

    def end(self):
        """Wait until the process ends; return (exit code, standard error)."""
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors


def saves(out):
    """Return how many times a run has saved its state."""
    found = checkpoint.generations(out, "state")
    return int(found[0].stem.rsplit("-", 1)[1]) if found else 0
