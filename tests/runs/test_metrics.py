"""Scores of sentences with known results, and a log that tolerates a partial line."""

import pytest
from sacrebleu.metrics import BLEU, CHRF

from gpuattn.errors import CheckpointError, ConfigError, DataError
from gpuattn.files import write_text
from gpuattn.runs.metrics import MetricsLog, round_times
from gpuattn.tasks.score import Scorer, score


def test_scores_of_known_sentences():
    references = ["the cat sat on the mat", "a dog", "Two birds sing in the tree"]
    found = ["the cat sat on the mat", "a cat", "two birds sing in the tree"]
    row = score(found, references, ["x", "y", "y"])
    assert row["exact_match"] == pytest.approx(100 / 3)
    assert row["exact_by_kind"] == {"x": 100.0, "y": 0.0}
    assert row["sentences"] == 3
    assert row["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    folded = score(found, references, lowercase=True, tokenize="none")
    assert "case:lc" in folded["bleu_signature"] and "tok:none" in folded["bleu_signature"]
    assert folded["bleu"] > row["bleu"]
    assert folded["chrf"] > row["chrf"]
    assert folded["exact_match"] == pytest.approx(200 / 3)
    assert folded["exact_by_kind"] == {}
    assert score(references, references)["bleu"] == pytest.approx(100)


def test_a_scorer_gives_what_sacrebleu_gives_each_time():
    references = ["The cat sat on the mat.", "a dog", "Two birds sing in the tree"]
    scorer = Scorer(references, lowercase=True)
    for found in (["the cat sat", "a  dog!", ""], ["The mat sat on the cat.", "a dog", "Two"]):
        row = scorer(found)
        bleu = BLEU(lowercase=True, force=True).corpus_score(found, [references])
        chrf = CHRF(lowercase=True).corpus_score(found, [references])
        assert (row["bleu"], row["chrf"]) == (bleu.score, chrf.score)
    with pytest.raises(DataError, match="2 hypotheses for 3"):
        scorer(["a", "b"])


def test_bleu_by_hand():
    # One sentence, 5 of 6 words: precisions 5/6, 3/5, 2/4, 1/3, no brevity penalty.
    row = score(["the cat sat on a mat"], ["the cat sat on the mat"])
    assert row["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_invalid_sentences_are_refused():
    with pytest.raises(DataError, match="2 hypotheses for 1"):
        score(["a", "b"], ["a"])
    with pytest.raises(DataError, match="at least one"):
        score([], [])
    with pytest.raises(ConfigError, match="13a, none"):
        score(["a"], ["a"], tokenize="intl")


def test_the_log_skips_a_partial_line_and_rewinds(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.read() == []
    log.add("start", update=0)
    valid = {"update": 5, "seconds": 1.5, "loss": 2.5, "score": 0, "text": "ü\u2028"}
    log.add("valid", **valid)
    log.add("train", update=10, seconds=2, loss=2.0)
    log.add("end", update=10)
    with log.path.open("a") as file:
        file.write('{"event": "train", "upda')
    assert [row["update"] for row in log.read()] == [0, 5, 10, 10]
    assert log.read("valid") == [{"event": "valid", **valid}]
    log.rewind(5)
    assert [row["event"] for row in log.read()] == ["start", "valid"]
    log.add("end", update=6)
    assert [row["update"] for row in log.read()] == [0, 5, 6]


def test_round_times_are_placed_at_their_updates():
    def rows(*pairs):
        return [{"update": update, "seconds": seconds} for update, seconds in pairs]

    assert round_times([]) == [] and round_times(rows((1, 0.0))) == []
    assert round_times(rows((100, 10.0))) == [
        (20, "2 s"), (40, "4 s"), (60, "6 s"), (80, "8 s"), (100, "10 s"),
    ]  # fmt: skip
    # The first ten updates take as long as the 90 others: there is no space for times in between.
    found = round_times(rows((100, 20.0), (10, 10.0)))
    assert [text for _, text in found] == ["5 s", "15 s", "20 s"]
    assert [update for update, _ in found] == [5, 55, 100]
    assert [text for _, text in round_times(rows((9, 7200.0)))][0] == "20 min"
    assert [text for _, text in round_times(rows((9, 5 * 3600.0)))][-1] == "5 h"


@pytest.mark.parametrize("junk", [
    b"5", b"null", b"[1]", b"\xff\xfe", b"{}", b"\0\0\0", b"[" * 9999,
    b'{"event": "valid", "update": 3}', b'{"event": ["x"], "update": 1}',
    b'{"event": "end", "update": "x"}',
])  # fmt: skip
def test_a_damaged_line_is_named_and_left_out(tmp_path, junk):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.add("start", update=0)
    with log.path.open("ab") as file:
        file.write(junk + b"\n")
    assert [row["event"] for row in log.read()] == ["start"]  # the last line may be incomplete
    log.add("end", update=6)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl is damaged: left out line 2$"):
        assert [row["event"] for row in log.read()] == ["start", "end"]
    with pytest.warns(UserWarning, match="line 2"):
        log.rewind(5)
    assert log.path.read_text() == '{"event": "start", "update": 0}\n'


def test_files_are_written_atomically(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    write_text(path, "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(CheckpointError, match="x.txt: No space left. Free some space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]
