"""Runs with ``until``, which end when evaluations are exact, and runs of a given time."""

import pytest

from gpuattn.errors import ConfigError
from gpuattn.runs.config import TrainConfig, resolve
from gpuattn.runs.metrics import MetricsLog, is_right
from gpuattn.tasks import texts
from gpuattn.tasks.translation import TranslationTask
from gpuattn.train.progress import Listener
from gpuattn.train.session import train
from gpuattn.units import Length

SMALL = {"task": "dates", "dim": 16, "heads": 2, "layers": (1, 1), "ffn": 16, "batch": 70,
         "max_len": 64, "vocab_size": 384, "score_pairs": 5, "warmup": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch):
    monkeypatch.setattr(texts, "GENERATED_PAIRS", 500)
    monkeypatch.setattr(texts, "HELD_OUT", 50)


class Heard(Listener):
    def __init__(self):
        self.lines, self.progresses = [], []

    def say(self, topic, text):
        self.lines.append((topic, text))

    def progress(self, progress):
        self.progresses.append(progress)

    def of(self, wanted):
        return [text for topic, text in self.lines if topic == wanted]


@pytest.fixture
def scored(monkeypatch):
    """Return a function that sets the exact matches of a run's evaluations."""

    def script(*pairs):
        rows = iter(pairs)

        def judge(task, answers, folder, update, loss):
            kinds = dict(zip("ab", next(rows), strict=True))
            mean = sum(kinds.values()) / 2
            return {"exact_match": mean, "exact_by_kind": kinds, "score": mean}, []

        monkeypatch.setattr(TranslationTask, "answers", lambda task, user, deal: [])
        monkeypatch.setattr(TranslationTask, "judge", judge)
        return rows

    return script


@pytest.mark.parametrize("row, right", [
    ({"exact_match": 99.9, "exact_by_kind": {"dates": 98.9, "times": 100.0}}, False),
    ({"exact_match": 99.5, "exact_by_kind": {"dates": 99.0, "times": 100.0}}, True),
    ({"exact_match": 100.0, "exact_by_kind": {}}, False), ({"loss": 1.0}, False),
])  # fmt: skip
def test_every_kind_must_be_right(row, right):
    assert is_right(row, 99.0) == right


def test_a_run_ends_when_two_evaluations_in_a_row_are_right(tmp_path, scored):
    left = scored((50, 99), (99, 99), (100, 98), (99, 100), (99.5, 99), (0, 0))
    config = TrainConfig(**SMALL, length="90u", until=99, eval_every="2u")
    report = Heard()
    outcome = train(config, tmp_path / "run", device="numpy", listener=report)
    assert outcome.finished and outcome.update == 10 and list(left) == [(0, 0)]
    ended = "99 % exact of every kind in 2 evaluations in a row"
    assert report.of("ended") == [f"{ended}, after 10 updates"]
    assert "until 99 % of every kind is exact, 90 updates at most" in report.of("update")[0]
    assert all(progress.at_most for progress in report.progresses)
    again = Heard()
    assert train(config, tmp_path / "run", device="numpy", listener=again).update == 10
    assert again.of("run") == [f"finished before, after 10 updates ({ended})"]


def test_the_count_of_right_evaluations_survives_a_stop(tmp_path, scored):
    scored((99, 99), (99, 99))
    config = TrainConfig(**SMALL, length="90u", until=99, eval_every="2u")
    calls = iter(range(1, 99))
    assert train(config, tmp_path / "run", device="numpy", stop=lambda: next(calls) > 3).update == 3
    assert train(config, tmp_path / "run", device="numpy").update == 4


def test_a_run_that_is_not_exact_at_its_limit_reports_it(tmp_path, scored):
    scored(*[(98, 100)] * 9)
    report = Heard()
    config = TrainConfig(**SMALL, length="6u", until=99, eval_every="2u")
    assert train(config, tmp_path / "run", device="numpy", listener=report).update == 6
    text = "6 updates ended before 99 % exact of every kind; continue with a longer --for"
    assert report.of("ended") == [text]


def test_until_is_for_tasks_with_one_right_translation():
    with pytest.raises(ConfigError, match="until is 99; accepted: 0 for files.*--patience"):
        TrainConfig(source="a", target="b", until=99)
    with pytest.raises(ConfigError, match="until: 101"):
        TrainConfig(task="toy", until=101)


def test_the_learning_rate_of_a_task_decays_over_the_requested_updates():
    toy = resolve(("", {"task": "toy"}))[0]
    assert toy.until == 99 and toy.lr_decay == 800 and toy.length == Length(450.0, "s")
    assert resolve(("", {"task": "toy", "length": "12m"}))[0].lr_decay == 800
    assert resolve(("", {"task": "toy", "length": "300u"}))[0].lr_decay == 0
    given = {"task": "toy", "length": "300u", "lr_decay": 200}
    assert resolve(("", given))[0].lr_decay == 200


class Clock:
    """A fake clock that tests advance."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize("eval_every", ["auto", "10s"])
def test_the_last_evaluation_is_part_of_the_time(tmp_path, monkeypatch, eval_every):
    """An update takes 1 s and an evaluation 20 s: a run of 100 s ends by then."""
    from gpuattn.train import threads, trainer

    clock = Clock()
    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(threads.BlasThreads, "_measure", lambda blas, update: None)
    inner = trainer.Trainer._update

    def update(self):
        clock.now += 1
        inner(self)

    def judge(task, answers, folder, update, loss):
        clock.now += 20
        return {"score": -loss}, []

    monkeypatch.setattr(trainer.Trainer, "_update", update)
    monkeypatch.setattr(TranslationTask, "answers", lambda task, user, deal: [])
    monkeypatch.setattr(TranslationTask, "judge", judge)
    config = TrainConfig(**SMALL | {"warmup": 0.1}, length="100s", eval_every=eval_every)
    assert train(config, tmp_path / "run", device="numpy").finished
    assert 80 < clock.now <= 101
    rows = MetricsLog(tmp_path / "run" / "metrics.jsonl").read("valid")
    assert len(rows) >= 2, "an earlier evaluation is needed to predict the time of the last one"
    finished = clock.now
    assert train(config, tmp_path / "run", device="numpy").finished
    assert clock.now == finished, "a finished run is not started again"
