"""gpuattn lecture: what it prints and writes, wrong inputs, no GPU, and Ctrl-C."""

import json
from pathlib import Path

import pytest

from gpuattn.lecture.harness import chapters, record
from gpuattn.lecture.harness.claims import load

STORED = record.stored
HEAD = '''"""{number}. {title}

Claim: one.
{extra}Regime: memory
Question: why?
Answer: so.
Vary: none
"""
from gpuattn.lecture import lecture

say = lecture(__doc__)
'''
GOOD = 'say.exact("B04", "FLOPs at d = 256", 131072)\n'
WRONG = 'say.exact("B04", "FLOPs at d = 256", 1)\n'
STOPPED = "import os\nif not os.path.exists('go'):\n    raise KeyboardInterrupt\n"
OTHER = 'say.exact("C05", "reads of a number", 3)\n'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a chapter into an empty lecture; the current folder is empty too."""
    folder = tmp_path / "chapters"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(chapters, "FOLDER", folder)
    monkeypatch.setattr(record, "stored", lambda: None)
    chapters.chapters.cache_clear()

    def chapter(number, title, code, extra=""):
        text = HEAD.format(number=number, title=title, extra=extra) + code
        (folder / f"c{number:02}_{title.split()[-1].lower()}.py").write_text(text)
        chapters.chapters.cache_clear()

    yield chapter
    chapters.chapters.cache_clear()


def read(path="lecture.json"):
    return json.loads(Path(path).read_text())


def numbers(path="lecture.json"):
    return [entry["number"] for entry in read(path)["chapters"]]


def test_it_prints_claims_and_writes_a_page_and_a_record(call, write, tmp_path):
    write(2, "Count FLOPs", GOOD)
    result = call("lecture", "--device", "numpy", "--out", "page.html", "--smoke")
    assert result.exit_code == 0
    assert "  exact    B04  FLOPs at d = 256: 131,072 (as printed)" in result.stdout
    assert "not built yet: chapter 1\n" in result.stdout
    assert "1 of 120 claims shown; page.html and page.json written" in result.stdout
    assert read("page.json")["smoke"] is True and "B04" in Path("page.html").read_text()


def test_a_claim_that_fails_is_an_error(call, write):
    write(2, "Count FLOPs", WRONG)
    write(7, "Softmax", "raise ValueError('lost')\n")
    result = call("lecture", "--device", "numpy")
    assert result.exit_code == 1
    assert "gpuattn: error: B04 FLOPs at d = 256" in result.stderr
    assert "gpuattn: error: ValueError: lost" in result.stderr  # and the others ran
    assert numbers() == [2, 7]


def test_some_chapters_keep_the_others_of_the_record(call, write):
    write(2, "Count FLOPs", GOOD)
    write(7, "Softmax", OTHER)
    call("lecture", "2", "--device", "numpy")
    assert numbers() == [2]
    result = call("lecture", "2", "--device", "numpy")
    assert "  not run: chapters 7\n" in result.stdout and "was not run" not in result.stdout
    assert "7. Softmax" in call("lecture", "softmax", "--device", "numpy").stdout
    assert numbers() == [2, 7]
    result = call("lecture", "2", "--device", "numpy", "--smoke")  # other sizes: anew
    assert numbers() == [2] and numbers("lecture.old.json") == [2, 7]
    assert "gpuattn: warning: lecture.json was a record of smoke False" in result.stderr


def test_ctrl_c_keeps_what_was_measured_and_missing_goes_on(call, write):
    write(2, "Count FLOPs", GOOD)
    write(7, "Softmax", STOPPED + OTHER)
    result = call("lecture", "--device", "numpy")
    assert result.exit_code == 130
    assert "gpuattn lecture --missing --device numpy goes on" in result.stderr
    assert numbers() == [2] and "B04" in Path("lecture.html").read_text()
    Path("go").touch()
    result = call("lecture", "--missing", "--device", "numpy")
    assert result.exit_code == 0 and numbers() == [2, 7]
    assert "7. Softmax" in result.stdout and "2. Count" not in result.stdout
    write(2, "Count FLOPs", "# a comment\n" + GOOD)  # the same code
    assert "2. Count" not in call("lecture", "--missing", "--device", "numpy").stdout
    write(2, "Count FLOPs", GOOD + GOOD)
    assert "2. Count" in call("lecture", "--missing", "--device", "numpy").stdout


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "import signal\n"
                                 "signal.raise_signal(signal.SIGTERM)\nimport time\n"
                                 "time.sleep(5)"])  # fmt: skip
def test_what_a_stopped_chapter_said_is_kept(call, write, end):
    """By Ctrl-C, and by a limit of time."""
    write(2, "Count FLOPs", GOOD + end + "\n")
    result = call("lecture", "--device", "numpy")
    assert result.exit_code == 130 and "keeps 0 chapters" in result.stderr
    (entry,) = read()["chapters"]
    assert entry["error"] == "it was stopped" and entry["statements"][0]["verdict"] == "exact"
    assert "it was stopped" in Path("lecture.html").read_text()
    write(2, "Count FLOPs", GOOD)
    assert call("lecture", "--missing", "--device", "numpy").exit_code == 0
    assert read()["chapters"][0]["error"] is None


def test_missing_does_not_go_on_with_another_machine(call, write):
    write(2, "Count FLOPs", GOOD)
    call("lecture", "--device", "numpy")
    other = read() | {"gpu": "another"}
    Path("lecture.json").write_text(json.dumps(other))
    result = call("lecture", "--missing", "--device", "numpy")
    assert result.exit_code == 2 and "gpu another, not None" in result.stderr
    assert read() == other


@pytest.mark.parametrize("arguments, code, said", [
    (["sofmax"], 2, "there is no chapter 'sofmax'; accepted: 2 flops, 7 softmax. "
                    "Did you mean 'softmax'?"),
    (["25"], 2, "there is no chapter '25'; accepted: 2 flops, 7 softmax"),
    (["--smoke", "--long"], 2, "--smoke and --long; accepted: one of them"),
    (["--beside", "none.json"], 2, "none.json"),
    (["--out", "none/page.html"], 1, "cannot write none/page.html"),
    (["--json", "none/r.json"], 1, "cannot write none/r.json"),
    (["--out", ""], 2, "the name is empty"),
    (["--out", "r.json"], 2, "--out and --json are both r.json"),
    (["--device", "gpu"], 2, "'gpu'"),
])  # fmt: skip
def test_wrong_inputs(call, write, arguments, code, said):
    write(2, "Count FLOPs", GOOD)
    write(7, "Softmax", OTHER)
    result = call("lecture", *arguments)
    assert result.exit_code == code and said in result.stderr


def test_a_file_that_is_no_record_is_not_overwritten(call, write):
    write(2, "Count FLOPs", GOOD)
    Path("lecture.json").write_text('{"mine": 1}')
    for arguments in ((), ("2",), ("--missing",), ("--beside", "lecture.json")):
        result = call("lecture", *arguments, "--device", "numpy")
        assert result.exit_code == 1 and "lecture.json is no record" in result.stderr
    assert read() == {"mine": 1}


def test_without_a_gpu_a_chapter_that_needs_one_shows_the_record(call, write):
    write(2, "Count FLOPs", GOOD)
    write(11, "Which kernel", 'say.record("A16", "chosen", 77077)\n', extra="Needs: a GPU\n")
    found = record.new("A card", "gpuattn lecture", chapters.Say().xp, False, False)
    chapter = chapters.chapters()[11]
    found["chapters"] = [chapters.run(chapter, chapters.Say(tell=lambda text: None))]
    Path("card.json").write_text(json.dumps(found))
    result = call("lecture", "kernel", "--device", "numpy", "--beside", "card.json")
    assert result.exit_code == 3
    assert "chapter 11 needs a GPU" in result.stderr
    assert "A card: A16  chosen: 77,077" in result.stdout
    assert "77,077" in Path("lecture.html").read_text()
    assert "gpuattn: warning: card.json: without the claims" in result.stderr
    result = call("lecture", "--device", "numpy")
    assert result.exit_code == 0 and "needs a GPU" in result.stdout


def test_without_a_gpu_the_stored_record_shows_what_is_missing(call, write, monkeypatch):
    write(2, "Count FLOPs", GOOD)
    write(6, "Fusion", 'say.record("C18", "launches", 77077)\n')
    found = record.new("A card, 99 GiB", "gpuattn lecture", chapters.Say().xp, False, False)
    found |= {"gpu": "A card", "chapters": [
        chapters.run(chapters.chapters()[6], chapters.Say(tell=lambda text: None))
    ]}  # fmt: skip
    write(6, "Fusion", OTHER)
    result = call("lecture", "--device", "numpy", "--out", "none.html")
    assert "no record of a GPU is at hand to show them; --beside FILE shows one" in result.stdout
    monkeypatch.setattr(record, "stored", STORED)
    monkeypatch.setattr(record, "__file__", str(Path("no/such/clone/at/all.py").resolve()))
    assert record.stored() is None
    record.STORED.parent.mkdir(parents=True)
    record.STORED.write_text(json.dumps(found))
    result = call("lecture", "--device", "numpy")
    assert result.exit_code == 0
    assert f"beside it: A card, 99 GiB, {found['date']} ({record.STORED})" in result.stdout
    assert "A card, 99 GiB: C18  launches: 77,077" in result.stdout
    page = Path("lecture.html").read_text()
    assert "chapter 6 shows it of A card" in page and "The figures of" not in page


def test_no_gpu_is_its_own_exit_code(call, write, monkeypatch):
    monkeypatch.setattr("gpuattn.runtime.device._missing_gpu", lambda: "none here")
    write(2, "Count FLOPs", GOOD)
    assert call("lecture", "--device", "cuda").exit_code == 3


def test_list_and_source_run_nothing(call, write):
    write(2, "Count FLOPs", "raise SystemExit\n")
    listed = call("lecture", "--list")
    assert listed.exit_code == 0 and " 2 flops" in listed.stdout
    assert f"B04 exact    {load()[1]['B04'].claim}" in listed.stdout
    assert "raise SystemExit" in call("lecture", "flops", "--source").stdout
