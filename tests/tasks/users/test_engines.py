"""A translator's first call compiles all its kernels ahead, by an engine that is not kept."""

from fake_runs import Array, training_on

from gpuattn.arrays import BFLOAT16
from gpuattn.decode.stepper import Hypothesis
from gpuattn.engine import Engine, beam
from gpuattn.runs.config import TrainConfig
from gpuattn.tasks.translation import TranslationTask
from gpuattn.tasks.users import engines


def test_a_translator_rehearses_its_first_batch_once(reversed_text, monkeypatch):
    config = TrainConfig(
        **reversed_text, vocab_size=300, max_len=40, dim=64, heads=2, layers=1, ffn=64, batch=256
    )
    task, made, rehearsals = TranslationTask(config), [], []
    rehearse = engines.rehearse
    monkeypatch.setattr(beam, "hypotheses_of", _nothing)
    monkeypatch.setattr(
        engines, "Engine", lambda *given, **more: made.append(Engine(*given, **more)) or made[-1]
    )
    with training_on("9.0") as run:

        def rehearsed(work):
            rehearse(work)
            rehearsals.append((len(made), len(run.launches)))

        monkeypatch.setattr(engines, "rehearse", rehearsed)
        for parameter in task.model.eval().parameters():
            parameter.data = parameter.data.astype(BFLOAT16).view(Array)
        user = task.user
        assert user.translate(["a b c", "d"]) == user.translate(["e f", "g"]) == ["", ""]
    assert rehearsals == [(1, 0)] and len(made) == 2 and user._engine is made[1]
    assert not made[0]._searches.run.graphs
    assert run.launched() == run.rehearsed


def _nothing(*texts, **_):
    return [[Hypothesis([], 0.0, 0.0, False)]] * len(texts[-1])
