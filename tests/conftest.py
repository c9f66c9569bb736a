"""Fixtures: which array module, seeded numbers, poisoned memory; and which tests run where."""

import collections
import os

import background
import delays
import numpy as np
import pytest

from gpuattn import arrays
from gpuattn.cuda import compiler
from gpuattn.errors import KernelCompileError

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
REQUIRED = os.environ.get("GPUATTN_REQUIRE", "")  # tools whose lack fails tests, by commas
POOL, JOB, LEFT_OUT = pytest.StashKey(), pytest.StashKey(), pytest.StashKey()

try:
    import cupy

    cupy = cupy if cupy.cuda.is_available() else None
except ImportError:
    cupy = None


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests marked exhaustive too")


def pytest_collection_modifyitems(items, config):
    """In the simulator only its own tests run; outside, test_simulator.py starts that run.

    Without ``--all``, the tests marked ``exhaustive`` are left out.
    """
    for item in items:
        if "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
    keep = [item for item in items if bool(item.get_closest_marker("simulator")) == SIMULATED]
    if SIMULATED:
        sample_cases(keep)
    if not config.option.all:
        chosen = [item for item in keep if not item.get_closest_marker("exhaustive")]
        config.stash[LEFT_OUT] = len(keep) - len(chosen)
        keep = chosen
    kept = set(keep)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(keep, key=lambda item: bool(item.get_closest_marker("background")))


def sample_cases(items):
    """Mark all but the first of each four cases of a test as exhaustive."""
    seen = collections.Counter()
    for item in items:
        test = item.nodeid.split("[")[0]
        if seen[test] % 4:
            item.add_marker("exhaustive")
        seen[test] += 1


def pytest_terminal_summary(terminalreporter, config):
    if count := config.stash.get(LEFT_OUT, 0):
        tests = "1 exhaustive test was" if count == 1 else f"{count} exhaustive tests were"
        terminalreporter.write_line(
            f"{tests} left out (of kernel variants, emulated problems, orders of the simulator and "
            "kills); pytest --all runs them too."
        )


def pytest_collection_finish(session):
    """Start what runs behind the other tests; its own tests come last and wait for it."""
    marks = [(item, item.get_closest_marker("background")) for item in session.items]
    marks = [(item, mark) for item, mark in marks if mark]
    marks.sort(key=lambda pair: not pair[1].kwargs.get("long"))
    if marks and not session.config.option.collectonly:
        pool, jobs = background.start(), {}
        session.stash[POOL] = pool
        for item, mark in marks:
            run, params = mark.kwargs["run"], item.callspec.params
            key = run, str(params)
            if key not in jobs:
                jobs[key] = pool.submit(run, **params)
            item.stash[JOB] = jobs[key]


def pytest_sessionfinish(session):
    if POOL in session.stash:
        session.stash[POOL].shutdown(cancel_futures=True)


@pytest.fixture
def result_of_background(request):
    """Waits for the function that the test's mark names, and returns or raises what it did."""
    return request.node.stash[JOB].result


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """The array module under test; GPU cases skip, by name, where there is no GPU."""
    if request.param == "numpy":
        return np
    if cupy is None:
        pytest.skip("no CUDA device")
    return cupy


@pytest.fixture
def gpu():
    """CuPy, for tests that only make sense on a GPU."""
    if cupy is None:
        pytest.skip("no CUDA device")
    return cupy


@pytest.fixture(params=delays.LATE)
def delayed(request, gpu):
    """Runs a test of a GPU as it is, and with work that comes late: see ``delays``."""
    with delays.delays(gpu, request.param):
        yield request.param


@pytest.fixture
def nvrtc():
    """The CUDA compiler of our own sources; skips without it, unless GPUATTN_REQUIRE names it."""
    try:
        return compiler.nvrtc()
    except KernelCompileError as error:
        if "nvrtc" in REQUIRED:
            raise
        pytest.skip(f"no NVRTC: {error}")


@pytest.fixture
def host_compiler():
    """The C++ compiler that ``emulator`` needs; skips where kernels cannot be emulated."""
    import emulator

    if reason := emulator.refusal():
        pytest.skip(reason)


@pytest.fixture
def nvvm():
    """Skips without Numba's compiler, which is too large for the ``test`` extra."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for library in ("cudart", "nvrtc", "nvvm"):  # numba-cuda fails in odd places without one
            load_nvidia_dynamic_lib(library)
    except (ImportError, RuntimeError) as error:
        if "nvvm" in REQUIRED:
            raise
        pytest.skip(f"pip install numba-cuda nvidia-nvvm nvidia-cuda-runtime: {error}")


@pytest.fixture
def bytecode(monkeypatch, tmp_path):
    """Processes that a test starts keep what Python compiles, as an installed program does."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True, scope="session")
def one_blas_thread():
    """Runs do not time numbers of BLAS threads; test_threads.py does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuattn.train.threads.candidates", lambda: [1])
        yield


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """What ``arrays.empty`` returns holds NaN (or a wild integer) until it is written."""

    def poisoned(xp, shape, dtype):
        fill = float("nan") if arrays.is_floating(dtype) else np.iinfo(dtype).max // 2
        return xp.full(shape, fill, dtype)

    monkeypatch.setattr(arrays, "allocate", poisoned)


@pytest.fixture
def reversed_text(tmp_path):
    """Return the options of 80 lines of single letters, and the same lines from right to left."""
    rng = np.random.default_rng(1)
    lines = [" ".join(rng.choice(list("abcdefgh"), rng.integers(1, 9))) for _ in range(80)]
    (tmp_path / "src").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "tgt").write_text("".join(f"{line[::-1]}\n" for line in lines))
    return {"source": str(tmp_path / "src"), "target": str(tmp_path / "tgt")}


if SIMULATED:
    import fastsim

    fastsim.install()
