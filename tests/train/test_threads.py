"""BLAS threads: the fastest number is used, each choice is recorded, and a stop changes no bit."""

import dataclasses

import pytest
from kill_drill import new_config
from stopping import After, assert_same_bits

from gpuattn.runs.folder import RunFolder
from gpuattn.runs.metrics import MetricsLog
from gpuattn.train import threads
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.train.threads import BlasThreads


class Library:
    """A fake of OpenBLAS on a machine with four cores; ``seconds``: {threads: time of a step}."""

    def __init__(self, seconds):
        self.seconds, self.num_threads, self.now, self.steps = seconds, 4, 0.0, []

    def set_num_threads(self, number):
        self.num_threads = number

    def step(self):
        self.steps.append(self.num_threads)
        self.now += self.seconds[self.num_threads]


@pytest.fixture
def choose(monkeypatch):
    """Return a function that makes (BlasThreads of a Library, a list of its choices)."""

    def new(library, asked="auto"):
        told = []
        monkeypatch.setattr(threads, "candidates", lambda: [1, 2, 4])
        monkeypatch.setattr(threads.time, "perf_counter", lambda: library.now)
        blas = BlasThreads(asked, library.step)
        blas._libraries = [library]
        blas.on_choice = lambda update, number, sentence: told.append((update, number, sentence))
        return blas, told

    return new


@pytest.mark.parametrize("seconds, number, tried", [
    ({1: 0.09, 2: 0.05, 4: 0.03}, 4, {1, 2, 4}),
    ({1: 0.05, 2: 0.049, 4: 0.05}, 1, {1, 2, 4}),  # hardly faster: one thread is kept
    ({1: 0.05, 2: 0.06, 4: 0.01}, 1, {1, 2}),  # slower with two: more are not tried
    ({1: 5.0, 2: 3.0, 4: 2.0}, 4, {1, 2, 4}),
])  # fmt: skip
def test_the_fastest_number_is_chosen(choose, seconds, number, tried):
    library = Library(seconds)
    blas, told = choose(library)
    blas.next(0)
    assert library.num_threads == number and blas.record == {0: number}
    assert set(library.steps[1:]) == tried
    ((update, chosen, sentence),) = told
    assert (update, chosen) == (0, number) and f"{1000 * seconds[1]:.3g} ms with 1" in sentence
    if seconds[1] > 1:
        assert len(library.steps) == 4, "one long step per number is enough"


def test_a_slowdown_starts_another_measurement(choose):
    library = Library({1: 0.09, 2: 0.05, 4: 0.03})
    blas, told = choose(library)
    blas.next(0)
    for update, rate in ((1, 1000), (20, 900), (40, 1100)):
        blas.next(update)
        blas.observe(rate)
    library.seconds = {1: 0.2, 2: 0.9, 4: 1.6}  # other processes use the same cores
    blas.next(60)
    assert len(told) == 1
    blas.observe(100)
    blas.next(61)
    assert blas.record == {0: 4, 61: 1} and library.num_threads == 1 and "before 4" in told[1][2]
    blas.observe(400)
    blas.next(80)
    blas.observe(1000)  # they have ended
    library.seconds = {1: 0.09, 2: 0.05, 4: 0.03}
    blas.next(81)
    assert blas.record == {0: 4, 61: 1, 81: 4}


def test_nothing_is_measured_beside_a_save(choose):
    library = Library({1: 0.05, 2: 0.09, 4: 0.09})
    blas, told = choose(library)
    blas.next(0)
    blas.observe(1000)
    blas.observe(400)
    library.seconds, steps = {1: 0.09, 2: 0.05, 4: 0.03}, len(library.steps)
    blas.next(20, alone=False)
    assert len(library.steps) == steps and len(told) == 1
    blas.next(21)
    assert blas.record == {0: 1, 21: 4}


def test_updates_after_a_stop_repeat_the_recorded_choices(choose):
    library = Library({1: 0.01, 2: 0.02, 4: 0.03})
    blas, told = choose(library)
    blas.record = {0: 2, 40: 4}
    used = {}
    for update in range(20, 60):
        blas.next(update)
        blas.observe(1000 if update == 20 else 1)
        used[update] = library.num_threads
        if update == 50:
            break
    assert {used[u] for u in range(20, 40)} == {2} and {used[u] for u in range(40, 51)} == {4}
    assert not library.steps and not told
    blas.observe(10_000)
    blas.next(60)
    assert blas.record[60] == 1, "after the recorded choices it measures again"


def test_another_number_after_a_stop_is_used_with_a_warning(choose):
    blas, told = choose(Library({}), asked=3)
    blas.record = {0: 2, 40: 1}
    blas.next(20)
    assert blas.record == {0: 2, 20: 3}
    assert "BLAS uses 3, no longer 2: bits may differ" in told[0][2]
    blas.restart()
    blas.next(30)
    blas.observe(1)
    blas.next(50)
    assert len(told) == 1, "a given number is not measured"


def test_the_previous_number_is_restored():
    blas = BlasThreads(1, None)
    before = [library.num_threads for library in blas._libraries]
    assert before, "NumPy's BLAS was not found"
    with pytest.raises(KeyError), blas.kept():
        blas.next(0)
        assert {library.num_threads for library in blas._libraries} == {1}
        raise KeyError
    assert [library.num_threads for library in blas._libraries] == before
    assert "blas" in blas.describe()


def test_measuring_does_not_affect_a_run(tmp_path):
    config = dataclasses.replace(new_config(tmp_path, "numpy", kills=0), threads=1)
    train(config, tmp_path / "given", device="numpy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "candidates", lambda: [1, 2])
        patch.setattr(BlasThreads, "_time", lambda blas: blas._step() or 1.0)  # none is faster
        train(dataclasses.replace(config, threads="auto"), tmp_path / "auto", device="numpy")
    assert_same_bits(tmp_path / "given", tmp_path / "auto")
    rows = MetricsLog(tmp_path / "auto" / "metrics.jsonl").read("threads")
    assert [(row["update"], row["threads"]) for row in rows] == [(0, 1)]


def test_a_run_with_a_changed_choice_resumes_bit_for_bit(tmp_path, monkeypatch):
    """A wide model, whose products OpenBLAS splits: two threads round differently on many CPUs."""
    config = dataclasses.replace(
        new_config(tmp_path, "numpy", kills=0), dim=96, ffn=512, batch=400, eval_every="4u",
        length="14u", threads="auto",
    )  # fmt: skip
    used = {}

    def scripted(blas, update):
        blas._rate, blas._due = None, False
        blas._choose(update, 2 if update == 0 else 1, "")

    def note(blas, number, inner=BlasThreads._use):
        inner(blas, number)
        used[blas._update] = number

    def next_update(blas, update, alone, inner=BlasThreads.next):
        blas._due = update == 10 and 10 not in blas.record
        inner(blas, update)

    def interrupt():
        interrupt.left -= 1
        if not interrupt.left:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(BlasThreads, "_measure", scripted)
    monkeypatch.setattr(BlasThreads, "_use", note)
    monkeypatch.setattr(BlasThreads, "next", next_update)
    monkeypatch.setattr(BlasThreads, "observe", lambda blas, rate: None)
    train(config, tmp_path / "whole", device="numpy")
    interrupt.left = 12
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", device="numpy", stop=interrupt)
    used.clear()
    assert train(config, tmp_path / "cut", device="numpy").finished  # from update 8
    assert used == {8: 2, 10: 1}
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")


def test_the_mean_of_checkpoints_is_evaluated_with_the_threads_of_the_run(tmp_path, monkeypatch):
    config = dataclasses.replace(new_config(tmp_path, "numpy", kills=0), threads=1, length="6u")
    blas, used = BlasThreads(2, None), []

    def noted(*args, inner=RunFolder.average_snapshots):
        used.append({library.num_threads for library in blas._libraries})
        return inner(*args)

    monkeypatch.setattr(RunFolder, "average_snapshots", noted)
    with blas.kept():
        blas.next(0)
        train(config, tmp_path / "run", device="numpy")
        assert {library.num_threads for library in blas._libraries} == {2}
    assert used == [{1}]


def test_another_blas_gives_a_warning(tmp_path, monkeypatch):
    config = dataclasses.replace(new_config(tmp_path, "numpy", kills=0), length="6u")
    said, report = [], Listener()
    report.say = lambda topic, text: said.append((topic, text))
    train(config, tmp_path / "run", device="numpy", stop=After(2))
    monkeypatch.setattr(BlasThreads, "describe", lambda blas: "mkl 2027 Zen 9")
    train(config, tmp_path / "run", device="numpy", listener=report)
    (text,) = [text for topic, text in said if topic == "warning" and "products" in text]
    assert "now by mkl 2027 Zen 9: bits may differ" in text


def test_one_core_needs_no_measurement(choose, monkeypatch):
    library = Library({1: 0.09})
    blas, told = choose(library)
    monkeypatch.setattr(threads, "candidates", lambda: [1])
    blas.next(0)
    blas.observe(1000)
    blas.next(20)
    blas.observe(1)
    blas.next(40)
    assert blas.record == {0: 1} and not library.steps and len(told) == 1


def test_a_given_number_replaces_later_recorded_choices(tmp_path, monkeypatch):
    config = dataclasses.replace(new_config(tmp_path, "numpy", kills=0), length="12u")
    log, used = MetricsLog(tmp_path / "run" / "metrics.jsonl"), {}

    def note(blas, number, inner=BlasThreads._use):
        inner(blas, number)
        used[blas._update] = number

    train(dataclasses.replace(config, threads=2), tmp_path / "run", device="numpy", stop=After(4))
    log.add("threads", update=8, threads=2)  # recorded by a process that was killed
    one = dataclasses.replace(config, threads=1)
    train(one, tmp_path / "run", device="numpy", stop=After(2))
    monkeypatch.setattr(BlasThreads, "_use", note)
    assert train(one, tmp_path / "run", device="numpy").finished
    assert [(row["update"], row["threads"]) for row in log.read("threads")][1:] == [(8, 2), (2, 1)]
    assert set(used.values()) == {1}
