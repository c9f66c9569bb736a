"""What a chapter says: figures of this machine beside those of a source, each judged by its kind.

- exact: equal to what the source prints, to its last digit.
- near: an error below a bound that stands in the chapter.
- order: one figure below another. A clock is judged on a GPU only.
- differs: the source is wrong; equal to the right figure of ``claims.toml``, not to the printed.
- record: shown beside the source's, never judged.

A statement is a dict that a record keeps as JSON: ``id``, ``what``, ``kind``, ``got``, and of its
kind ``printed``, ``right``, ``bound``, or ``less``, ``more`` (lists of samples of a clock) with
their ``names``, ``clock`` and ``unit``; ``verdict`` is the kind, or "fails".
"""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import to_cpu
from gpuattn.bench import timing
from gpuattn.errors import ConfigError
from gpuattn.lecture.harness.claims import load
from gpuattn.lecture.harness.forms import host_peak
from gpuattn.runtime.device import array_module
from gpuattn.units import nearest

FAILS = "fails"
MEASURED = 4  # digits of a measured figure that are shown
MANY_US = 1e4  # shown as ms
LEAST, MOST, ENOUGH = 3, 20, 2e5  # samples of a clock on a CPU; microseconds of all together
LONG_US = 5e4  # microseconds of a call on a GPU of which LEAST samples are enough
GRAPH_CALLS, GRAPH_US = 20, 2000.0  # calls of a graph: at most so many, about so long
Points = Sequence[tuple[float, float]]


class Say:
    """Collects the ``statements`` and ``figures`` of a chapter, and tells them as lines.

    ``xp``: numpy or cupy. ``rng``: random numbers, the same in each run. ``sizes``: of problems
    that replace the chapter's, by name.
    """

    def __init__(
        self,
        device: str = "numpy",
        *,
        smoke: bool = False,
        long: bool = False,
        sizes: Mapping[str, int] | None = None,
        tell: Callable[[str], Any] = print,
    ) -> None:
        self.xp, self.device = array_module(device), device
        self.rng = np.random.default_rng(0)
        self.statements: list[dict[str, Any]] = []
        self.figures: list[dict[str, Any]] = []
        self._smoke, self._long, self._given, self.tell = smoke, long, dict(sizes or {}), tell
        self._names: list[str] = []  # of sizes that the chapter has

    # ---- problems -------------------------------------------------------------------------------

    @property
    def dtype(self) -> str:
        """The dtype of problems whose time and memory count: 16 bits on a GPU."""
        return "float16" if self.device == "cuda" else "float32"

    def size(self, name: str, usual: int, smoke: int, long: int | None = None) -> int:
        """Return a size of the chapter's problem: as given, or small for a smoke run, or usual."""
        self._names.append(name)
        if name in self._given:
            return self._given[name]
        return smoke if self._smoke else long if self._long and long else usual

    def check_sizes(self) -> None:
        """Raise ConfigError for a given size that the chapter does not have."""
        for name in self._given:
            if name not in self._names:
                accepted = ", ".join(self._names) or "none"
                advice = nearest(name, self._names)
                raise ConfigError(f"there is no size {name!r}; accepted: {accepted}{advice}")

    def array(self, values: Any, dtype: Any = np.float32) -> Any:
        """Return values as an array on the chapter's device."""
        return self.xp.asarray(np.asarray(values, dtype))

    def normal(self, *shape: int, dtype: Any = np.float32) -> Any:
        """Return random numbers with mean 0 and deviation 1."""
        return self.array(self.rng.standard_normal(shape, np.float32), dtype)

    def times(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Return the microseconds of each call, some samples; on a GPU the calls take turns."""
        if self.device == "cuda":
            return _alternate(calls)
        return {name: _samples(call, 1 if self._smoke else LEAST) for name, call in calls.items()}

    def kernel_times(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Return the microseconds of each call; on a GPU in CUDA graphs, without the host's."""
        if self.device != "cuda":
            return self.times(calls)
        try:
            with self.stream():
                graphs = {name: _graph(call) for name, call in calls.items()}
                times = _alternate(graphs)
        except Exception as error:  # noqa: BLE001 no graph can hold them: with the host, then
            self.tell(f"  (by launches, as no graph holds them: {error})")
            return self.times(calls)
        return {
            name: [us / len(graphs[name].calls) for us in samples]
            for name, samples in times.items()
        }

    def stream(self) -> Any:
        """Return the context of a stream that CUDA graphs can be captured on; of none on NumPy."""
        if self.device != "cuda":
            return contextlib.nullcontext()
        self.xp.cuda.Device().synchronize()
        return self.xp.cuda.Stream(non_blocking=True)

    def launches(self, call: Callable[[], Any]) -> int | None:
        """Return how many kernels, copies and fills a call launches; None on NumPy."""
        if self.device != "cuda":
            return None
        with self.stream():
            return timing.Graph([call, timing.captured]).results[-1]

    def peak(self, call: Callable[[], Any]) -> float:
        """Return the most bytes that a call holds beyond what was there; inf if they do not fit."""
        if self.device != "cuda":
            return host_peak(call)
        pool = self.xp.cuda.MemoryPool()
        try:
            with self.xp.cuda.using_allocator(pool.malloc):
                call()
            return pool.total_bytes()
        except self.xp.cuda.memory.OutOfMemoryError:
            return math.inf
        finally:
            pool.free_all_blocks()

    def clear(self) -> None:
        """Give back the memory that arrays of a GPU have held."""
        if self.device == "cuda":
            gc.collect()
            self.xp.get_default_memory_pool().free_all_blocks()

    # ---- statements -----------------------------------------------------------------------------

    def exact(self, id: str, what: str, got: Any) -> None:
        """State a figure that equals what the source prints under ``what``."""
        self._state(id, what, "exact", got=got)

    def near(self, id: str, what: str, error: Any, bound: float) -> None:
        """State an error that is at most ``bound``."""
        self._state(id, what, "near", got=float(error), bound=bound)

    def order(
        self, id: str, what: str, pair: Mapping[str, Any], unit: str = "", clock: bool = False
    ) -> None:
        """State that of a pair {name: figure} the first figure is below the second.

        Figures are numbers or lists of samples. ``clock``: they are times, which a CPU does not
        judge.
        """
        less, more = pair.values()
        facts = {"names": list(pair), "less": less, "more": more, "unit": unit, "clock": clock}
        self._state(id, what, "order", got=_compared(pair, unit), **facts)

    def faster(self, id: str, what: str, us: Mapping[str, Any]) -> None:
        """State that of a pair of calls {name: microseconds} the first takes less time."""
        self.order(id, what, us, "us", clock=True)

    def differs(self, id: str, what: str, got: Any) -> None:
        """State a figure that is not the one that the source prints, but the right one."""
        self._state(id, what, "differs", got=got)

    def record(self, id: str, what: str, got: Any = None) -> None:
        """State a figure beside the source's, if it prints one, without judging it."""
        self._state(id, what, "record", got=got)

    def _state(self, id, what, kind, **facts):
        claim = load()[1][id]
        if kind in ("exact", "differs") and what not in claim.printed:
            accepted = "; ".join(claim.printed) or "none"
            raise ConfigError(f"{id} prints no figure {what!r}; accepted: {accepted}")
        statement = {"id": id, "what": what, "kind": kind, "gpu": self.device == "cuda", **facts}
        for name in ("printed", "right"):
            if what in getattr(claim, name):
                statement[name] = getattr(claim, name)[what]
        statement = plain(statement)
        statement["verdict"] = verdict(statement)
        self.statements.append(statement)
        self.tell(f"  {statement['verdict']:8} {id}  {line(statement)}")

    # ---- figures --------------------------------------------------------------------------------

    def curves(
        self, title: str, series: Mapping[str, Points], *, label: str, alt: str = "",
        unit: str = "", log: str = "", points: Iterable = (), levels: Iterable = (),
    ) -> None:  # fmt: skip
        """Draw curves; ``alt`` says in words what they show: by default, where each ends.

        ``log``: the axes that are logarithmic, as in "xy". Others: see ``svg.curves``.
        """
        finite = {
            name: [point for point in line if math.isfinite(point[1])]
            for name, line in series.items()
        }
        given = {"series": finite, "label": label, "unit": unit, "points": list(points),
                 "levels": list(levels), "log": "y" in log, "log_x": "x" in log}  # fmt: skip
        ends = {name: line[-1] for name, line in finite.items() if line}
        told = [f"{name}: {y:,.3g} {unit}".strip() + f" at {x:,}" for name, (x, y) in ends.items()]
        self._draw("curves", title, alt or "; ".join(told), **given)

    def bars(
        self, title: str, rows: Mapping[str, float], unit: str = "", *, alt: str = "",
        grey: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """Draw a bar for each of ``{name: value}``; ``grey``: names of the source's figures."""
        texts = [[name, value, f"{value:,.4g} {unit}".strip()] for name, value in rows.items()]
        alt = alt or "; ".join(f"{name}: {shown}" for name, _, shown in texts)
        self._draw("bars", title, alt, rows=texts, grey=list(grey))

    def maps(
        self, title: str, alt: str, weights: Any, rows: Sequence[Any], columns: Sequence[Any]
    ) -> None:
        """Draw a map of weights (rows, columns) from 0 to 1."""
        words = {"rows": list(map(str, rows)), "columns": list(map(str, columns))}
        self._draw("map", title, alt, weights=to_cpu(weights), **words)

    def _draw(self, kind, title, alt, **facts):
        self.figures.append(plain({"kind": kind, "title": title, "alt": alt, **facts}))


# ---- judging ------------------------------------------------------------------------------------


def verdict(statement: Mapping[str, Any]) -> str:
    """Return the kind of a statement that holds, "record" where it is not judged, or "fails"."""
    kind, got = statement["kind"], statement["got"]
    if kind == "exact":
        holds = agrees(got, statement["printed"])
    elif kind == "near":
        holds = isinstance(got, float) and got <= statement["bound"]
    elif kind == "differs":
        holds = agrees(got, statement["right"]) and not agrees(got, statement["printed"])
    elif kind == "order" and (statement["gpu"] or not statement["clock"]):
        holds = middle(statement["less"]) < middle(statement["more"])
    else:
        return "record"
    return kind if holds else FAILS


def agrees(got: Any, printed: Any) -> bool:
    """Return whether a figure is the printed one, to the printed digits."""
    if isinstance(printed, list):
        return isinstance(got, list) and len(got) == len(printed) and all(map(agrees, got, printed))
    if isinstance(printed, float) and isinstance(got, int | float):
        return round(got, len(repr(printed).partition(".")[2])) == printed
    return type(got) is type(printed) and got == printed


def ratio(more: Any, less: Any) -> float:
    """Return how many times the median of samples is that of others."""
    return middle(more) / middle(less)


def middle(samples: Any) -> float:
    """Return a number (as text where it is infinite), or the median of a list of samples."""
    if isinstance(samples, str):
        return float(samples)
    return statistics.median(samples) if isinstance(samples, list) else samples


# ---- text ---------------------------------------------------------------------------------------


def line(statement: Mapping[str, Any]) -> str:
    """Return a statement in a line: what, the figure of this machine, and that of the source."""
    what, printed = statement["what"], text(statement.get("printed"))
    if statement["got"] is None:
        return f"{what}: " + (
            f"printed {printed}, not measured" if printed != "-" else "not measured here"
        )
    said = f"{what}: {figure(statement)}"
    if "bound" in statement or "printed" not in statement:
        return said
    return (
        f"{said} (as printed)"
        if statement["verdict"] == "exact"
        else f"{said} (printed: {printed})"
    )


def figure(statement: Mapping[str, Any]) -> str:
    """Return the figure of this machine: to the printed digits where it is judged by them."""
    got, name = statement["got"], {"exact": "printed", "differs": "right"}.get(statement["verdict"])
    if "bound" in statement:
        bound = f"at most {statement['bound']:g}" if statement["bound"] else "must be 0"
        return f"{text(got, 3)} ({bound})"
    return text(got, MEASURED) if name is None else text(statement[name])


def text(value: Any, digits: int = 6) -> str:
    """Return a figure as readers write it: "4 4 5", "20,971,520", "yes"."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(text(part, digits) for part in value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value and not 1e-3 <= abs(value) < 1e6:
            return f"{value:.2e}"
        before = math.floor(math.log10(abs(value))) + 1 if value else 1
        shown = f"{value:,.{max(0, digits - before)}f}"
        return shown.rstrip("0").rstrip(".") if "." in shown else shown
    return str(value)


def _samples(call, least):
    """Return microseconds of at least so many calls, and of more where they are short."""
    call()
    samples: list[float] = []
    while len(samples) < least or (least > 1 and sum(samples) < ENOUGH and len(samples) < MOST):
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
    return samples


def _alternate(launches):
    """Return the microseconds of each launch on a GPU; few samples where one takes long."""
    for launch in launches.values():
        launch()  # compiles
    if max(timing.sample(launch, 1)[0] for launch in launches.values()) < LONG_US:
        return timing.alternate(dict(launches))
    return {name: timing.sample(launch, LEAST) for name, launch in launches.items()}


def _graph(call):
    """Return a CUDA graph of some repetitions, which take about GRAPH_US."""
    call()
    (about,) = timing.sample(call, 1)
    return timing.Graph([call] * max(1, min(GRAPH_CALLS, int(GRAPH_US / about))))


def _compared(pair, unit):
    """Return a pair in words, as in "2 us (fused) < 5 us (composed)"."""
    less, more = (float(middle(plain(figure))) for figure in pair.values())
    if unit == "us" and max(less, more) >= MANY_US:
        less, more, unit = less / 1e3, more / 1e3, "ms"
    sign = "<" if less < more else ">" if less > more else "="
    first, second = (
        f"{f'{text(_whole(x), MEASURED)} {unit}'.strip()} ({name})"
        for name, x in zip(pair, (less, more), strict=True)
    )
    return f"{first} {sign} {second}"


def _whole(x):
    return int(x) if x.is_integer() else x


def plain(value: Any) -> Any:
    """Return nested values as JSON has them; inf and NaN become text."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    value = value.tolist() if hasattr(value, "tolist") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
