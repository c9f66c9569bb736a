"""The receipt of a GPU run: ``python -m gpuattn.bench.receipt`` writes tests/gpu_receipt.json.

It holds a digest of the sources that decide what a GPU computes, and the outcome of every GPU test.
A CPU test fails when the digest is stale, so no kernel changes without a GPU run. Where some tests
did not pass, ``--again`` runs these alone, as long as the sources are those of the run before: for
a test that was wrong itself.

``--arch 75`` runs the tests, without those of time, with GPUATTN_ARCH=75: kernels run as on a GPU
of that compute capability. The outcomes are a section of the receipt, with a digest of their own.
Tests of forms that such a GPU lacks are skipped there.

No test runs on several GPUs. What was tried there by hand, and at which commit, is the section
"by_hand", written by a person; a new receipt keeps it.

Where no GPU is at hand, tests/gpu_run_awaited.json names the one digest that may wait, since when
and why. The test then skips and says so; any further change of a covered source fails it. The next
receipt deletes that file.
"""

import datetime
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from gpuattn.cuda.gpu import FORCED, forced_capability

ROOT = Path(__file__).parents[2]
COVERED = (
    "rawkernels", "gpuattn/ops", "gpuattn/numbakernels", "gpuattn/autodiff", "gpuattn/cuda",
    "gpuattn/gemm", "gpuattn/runtime", "gpuattn/engine", "gpuattn/arrays.py", "gpuattn/rng.py",
    "gpuattn/impls.py", "gpuattn/modes.py",
)  # fmt: skip
TIMED = "timing"  # the marker of tests with time limits
RECEIPT = ROOT / "tests" / "gpu_receipt.json"
AWAITED = ROOT / "tests" / "gpu_run_awaited.json"
OUTCOMES = ROOT / "build" / "gpu_outcomes.json"  # of the last run that gave no receipt


def digest() -> str:
    """Return a SHA-256 over the names and contents of the covered sources."""
    total = hashlib.sha256()
    for place in COVERED:
        path = ROOT / place
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix in (".py", ".cu", ".cuh") and file.is_file():
                total.update(f"{file.relative_to(ROOT).as_posix()}\0".encode())
                total.update(file.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return total.hexdigest()


def main(
    shards: Sequence[Sequence[Path]] | None = None, again: bool = False, arch: int | None = None
) -> int:
    """Run the GPU tests in shards (lists of folders and files), then write the receipt.

    Each test runs once. Those with time limits run last, one at a time. ``again``: run only those
    that did not pass in the run before. ``arch``: of GPUATTN_ARCH. Returns the exit code: 1,
    without a receipt, when a test failed or (without ``arch``) was skipped, or none ran, or when
    there is no run of these sources to go on with.
    """
    if arch is not None:
        return _force(shards, arch)
    outcomes = _known() if again else {}
    if again and not outcomes:
        print("--again: no run of these sources is known; run all tests", file=sys.stderr)
        return 1
    if outcomes:
        places = list(map(_place, _others(outcomes)))
        outcomes = {test: outcome for test, outcome in outcomes.items() if outcome == "passed"}
        outcomes.update(_run(places, "gpu", parallel=False))
    else:
        for shard in shards or _shards():
            outcomes.update(_run(shard, f"gpu and not {TIMED}", parallel=_has_xdist()))
        outcomes.update(_run([ROOT / "tests"], f"gpu and {TIMED}", parallel=False))
    bad = _others(outcomes)
    for test in bad:
        print(f"{outcomes[test]}: {test}", file=sys.stderr)
    if bad or not outcomes:
        OUTCOMES.parent.mkdir(exist_ok=True)
        OUTCOMES.write_text(json.dumps({"digest": digest(), "tests": outcomes}))
        print(f"no receipt: {len(bad)} of {len(outcomes)} tests did not pass", file=sys.stderr)
        return 1
    receipt, stored = {"digest": digest(), **_machine()}, _stored()
    receipt |= {name: stored[name] for name in ("by_hand", "forced") if name in stored}
    receipt["tests"] = dict(sorted(outcomes.items()))
    RECEIPT.write_text(json.dumps(receipt, indent=1) + "\n")
    for path in (AWAITED, OUTCOMES):
        path.unlink(missing_ok=True)
    print(f"{len(outcomes)} GPU tests passed; wrote {RECEIPT}")
    return 0


def _force(shards, arch):
    """Run the tests with GPUATTN_ARCH, write the receipt's section; return the exit code."""
    os.environ[FORCED] = str(arch)
    forced_capability()  # refuses nonsense before any test runs
    outcomes = {}
    for shard in shards or _shards():
        outcomes.update(_run(shard, f"gpu and not {TIMED}", parallel=_has_xdist()))
    bad = [test for test in _others(outcomes) if outcomes[test] != "skipped"]
    for test in bad:
        print(f"{outcomes[test]}: {test}", file=sys.stderr)
    if bad or "passed" not in outcomes.values():
        print(f"no receipt: {len(bad)} of {len(outcomes)} tests failed", file=sys.stderr)
        return 1
    receipt, section = _stored(), {"digest": digest(), **_machine()}
    section["tests"] = dict(sorted(outcomes.items()))
    receipt["forced"] = receipt.get("forced", {}) | {str(arch): section}
    RECEIPT.write_text(json.dumps(receipt, indent=1) + "\n")
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    print(f"{passed} of {len(outcomes)} GPU tests passed as on {arch}; wrote {RECEIPT}")
    return 0


def _stored():
    return json.loads(RECEIPT.read_text()) if RECEIPT.exists() else {}


def _known():
    """Return {test: outcome} of the run before, or {} where there is none of these sources."""
    stored = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    return stored["tests"] if stored.get("digest") == digest() else {}


def _others(outcomes):
    """Return the tests that did not pass."""
    return [test for test, outcome in outcomes.items() if outcome != "passed"]


def _place(test):
    """Return the argument of pytest for a test of ``outcomes``, or for a file that failed."""
    module, name = test.split("::", 1)
    if not module:  # an error of the file ``name``, before any of its tests
        return f"{name.replace('.', '/')}.py"
    return f"{module.replace('.', '/')}.py::{name}"


def _shards():
    """Return one shard for several processes; without xdist one a folder, each some minutes."""
    tests = ROOT / "tests"
    if _has_xdist():
        return [[tests]]
    folders = sorted(path for path in tests.iterdir() if list(path.glob("test_*.py")))
    return [sorted(tests.glob("test_*.py")), *[[folder] for folder in folders]]


def _run(shard, marker, parallel):
    """Return {test: outcome} of the tests in a shard with a marker, in several processes or one."""
    outcomes_file = ROOT / ".gpu_report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--all", "-m", marker]
    command += ["--continue-on-collection-errors", f"--junitxml={outcomes_file}"]
    if parallel:
        command += ["-n", str(max(1, os.cpu_count() - 2)), "--dist", "worksteal"]
    one_thread = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # the processes use all cores
    subprocess.run([*command, *map(str, shard)], cwd=ROOT, env=one_thread, check=False)
    outcomes = {}
    for case in ElementTree.parse(outcomes_file).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes[name] = min(kinds) if kinds else "passed"
    outcomes_file.unlink()
    return outcomes


def _has_xdist():
    return importlib.util.find_spec("xdist") is not None


def _machine():
    import cupy

    from gpuattn.runtime.device import versions

    runtime = cupy.cuda.runtime
    return {
        "gpu": runtime.getDeviceProperties(runtime.getDevice())["name"].decode(),
        "driver": runtime.driverGetVersion(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


if __name__ == "__main__":
    asked = sys.argv[sys.argv.index("--arch") + 1] if "--arch" in sys.argv else None
    sys.exit(main(again="--again" in sys.argv[1:], arch=None if asked is None else int(asked)))
