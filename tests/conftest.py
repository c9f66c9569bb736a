"""Fixtures (array modules, seeded numbers, poisoned memory) and the choice of tests that run."""

import collections
import contextlib
import inspect
import os

import background
import compiled
import delays
import numpy as np
import pytest
from own_plans import separate_plans

from gpuattn import arrays
from gpuattn.cuda import compiler
from gpuattn.cuda.gpu import FORCED, forced_capability
from gpuattn.errors import KernelCompileError, UnsupportedError

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
REQUIRED = os.environ.get("GPUATTN_REQUIRE", "")  # tools; without one tests fail
POOL, JOB, LEFT_OUT_COUNT = pytest.StashKey(), pytest.StashKey(), pytest.StashKey()

try:
    import cupy

    cupy = cupy if cupy.cuda.is_available() else None
except ImportError:
    cupy = None


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests marked exhaustive too")


def pytest_collection_modifyitems(items, config):
    """Select tests: with NUMBA_ENABLE_CUDASIM=1 those marked ``simulator``, else the others.

    Without ``--all``, the tests marked ``exhaustive`` are left out. Background tests come last.
    """
    for item in items:
        if "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
    keep = [item for item in items if bool(item.get_closest_marker("simulator")) == SIMULATED]
    if SIMULATED:
        sample_cases(keep)
    if not config.option.all:
        chosen = [item for item in keep if not item.get_closest_marker("exhaustive")]
        config.stash[LEFT_OUT_COUNT] = len(keep) - len(chosen)
        keep = chosen
    kept = set(keep)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(keep, key=lambda item: bool(item.get_closest_marker("background")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test of a form that the GPU of GPUATTN_ARCH lacks.

    Such a form raises UnsupportedError, or a test asserts that it runs and shows the refusal.
    """
    try:
        return (yield)
    except (AssertionError, UnsupportedError) as error:
        if forced_capability() is None or "compute capability is" not in str(error):
            raise
        pytest.skip(f"with {FORCED}: {error}")


def sample_cases(items):
    """Mark three of every four cases of a test as exhaustive."""
    seen = collections.Counter()
    for item in items:
        test = item.nodeid.split("[")[0]
        if seen[test] % 4:
            item.add_marker("exhaustive")
        seen[test] += 1


def pytest_terminal_summary(terminalreporter, config):
    if count := config.stash.get(LEFT_OUT_COUNT, 0):
        tests = "1 exhaustive test was" if count == 1 else f"{count} exhaustive tests were"
        terminalreporter.write_line(
            f"{tests} left out (kernel variants, emulated problems, thread orders of "
            "the simulator, killed runs); pytest --all runs all."
        )


def pytest_collection_finish(session):
    """Start the functions of tests marked ``background``; these tests run last and wait."""
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
    """A function that waits for the one in the test's mark and returns its result or raises."""
    return request.node.stash[JOB].result


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """The array module under test; the case ``cupy`` is skipped where there is no GPU."""
    if request.param == "numpy":
        return np
    if cupy is None:
        pytest.skip("no CUDA device")
    return cupy


@pytest.fixture
def gpu():
    """CuPy, for tests that need a GPU."""
    if cupy is None:
        pytest.skip("no CUDA device")
    return cupy


@pytest.fixture(params=delays.LATE)
def delayed(request, gpu):
    """Runs a GPU test as it is and with delayed streams or steps: see ``delays``."""
    with delays.delays(gpu, request.param):
        yield request.param


@pytest.fixture
def nvrtc():
    """NVRTC. Without it a test is skipped, or fails if GPUATTN_REQUIRE names nvrtc."""
    try:
        return compiler.nvrtc()
    except KernelCompileError as error:
        if "nvrtc" in REQUIRED:
            raise
        pytest.skip(f"no NVRTC: {error}")


@pytest.fixture
def nvdisasm():
    """The disassembler. Without it a test is skipped, or fails if GPUATTN_REQUIRE names nvrtc."""
    if compiled.disassembler() is None:
        assert "nvrtc" not in REQUIRED, "nvdisasm is missing: pip install nvidia-cuda-nvdisasm"
        pytest.skip("no nvdisasm")


@pytest.fixture
def host_compiler():
    """Skips a test where ``emulator`` has no C++ compiler that it can use."""
    import emulator

    if reason := emulator.refusal():
        pytest.skip(reason)


@pytest.fixture
def nvvm():
    """Skips a test without Numba's CUDA compiler, which is too large for the ``test`` extra."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for library in ("cudart", "nvrtc", "nvvm"):  # numba-cuda needs all three
            load_nvidia_dynamic_lib(library)
    except (ImportError, RuntimeError) as error:
        if "nvvm" in REQUIRED:
            raise
        pytest.skip(f"pip install numba-cuda nvidia-nvvm nvidia-cuda-runtime: {error}")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True, scope="session")
def one_blas_thread():
    """Training does not search for the best number of BLAS threads; test_threads.py tests that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuattn.train.threads.candidates", lambda: [1])
        yield


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """``arrays.empty`` returns memory filled with NaN, or with a huge integer."""

    def poisoned(xp, shape, dtype):
        fill = float("nan") if arrays.is_floating(dtype) else np.iinfo(dtype).max // 2
        return xp.full(shape, fill, dtype)

    monkeypatch.setattr(arrays, "allocate", poisoned)


@pytest.fixture(autouse=True)
def own_plans(request):
    """A test that patches modules finds no plans of other tests' calls, and leaves none."""
    patches = "monkeypatch" in inspect.signature(request.function).parameters
    with separate_plans() if patches else contextlib.nullcontext():
        yield


@pytest.fixture
def reversed_text(tmp_path):
    """Write 80 lines of letters and the same lines reversed; return them as options of a run."""
    rng = np.random.default_rng(1)
    lines = [" ".join(rng.choice(list("abcdefgh"), rng.integers(1, 9))) for _ in range(80)]
    (tmp_path / "src").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "tgt").write_text("".join(f"{line[::-1]}\n" for line in lines))
    return {"source": str(tmp_path / "src"), "target": str(tmp_path / "tgt")}


if SIMULATED:
    import fastsim

    fastsim.install()
