"""Each chapter holds on NumPy with small sizes, has its parts, and runs by itself."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from gpuattn.lecture.harness import chapters
from gpuattn.lecture.harness.chapters import FIELDS, choose, faults, read_doc
from gpuattn.lecture.harness.record import entry_of

WHOLE_ON_A_CPU = {2, 3, 7, 9, 12, 17, 22}
NUMBERS = sorted(chapters.chapters())
LINES = 104  # of a chapter


@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_holds(smoke, number):
    entry = entry_of(smoke, number)
    assert entry["statements"] and not faults(entry)
    assert entry["figures"]
    for figure in entry["figures"]:
        assert figure["title"] and figure["alt"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_chapter_has_its_parts(number):
    chapter = chapters.chapters()[number]
    assert set(chapter.fields) | {"Needs"} == set(FIELDS)
    assert chapter.fields["Question"].endswith("?")
    assert chapter.source.count("\n") <= LINES
    assert chapter.source.count("\n# %%") >= 2  # cells
    assert chapter.path.stem.startswith(f"c{number:02}_")


def test_seven_chapters_are_whole_on_a_cpu(smoke):
    assert list(range(1, 25)) == NUMBERS
    for number in WHOLE_ON_A_CPU:
        said = {s["id"] for s in entry_of(smoke, number)["statements"]}
        assert said == set(chapters.chapters()[number].claims)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.exhaustive
def test_the_command_to_vary_runs(number):
    program, *arguments = shlex.split(chapters.chapters()[number].fields["Vary"])
    small = ["--device", "numpy", "--smoke"] if program == "python" else []
    start = {"python": [], "gpuattn": ["-m", "gpuattn"]}[program]
    command = [sys.executable, *start, *arguments, *small]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_chapter_is_another_with_other_measures(tmp_path, monkeypatch):
    """So a record's chapters are measured again, and no others, when the harness changes."""
    files = {n: [p.stem for p in chapters.sources(c.path)] for n, c in chapters.chapters().items()}
    assert files[14] == ["c14_ladder", "forms", "steps"] and files[24] == ["c24_records"]
    assert files[11] == ["attention", "c11_choice", "forms"]  # one imports the other
    folder = shutil.copytree(chapters.FOLDER, tmp_path / "lecture")
    before = {n: c.hash for n, c in chapters.chapters().items()}
    with (folder / "harness" / "steps.py").open("a") as file:
        file.write("SAMPLES = 2\n")
    monkeypatch.setattr(chapters, "FOLDER", folder)
    other = [n for n, c in chapters.chapters().items() if c.hash != before[n]]
    assert other == [n for n in NUMBERS if "steps" in files[n]] == [14, 18, 19]


def alone(*arguments, name="c22_hars"):
    command = [sys.executable, "-m", f"gpuattn.lecture.{name}", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_chapter_runs_by_itself():
    run = alone("V=500", "--smoke", "--device", "numpy")
    assert run.returncode == 0 and not run.stderr
    assert run.stdout.startswith("22. ") and "500 (all)" in run.stdout


@pytest.mark.parametrize("arguments, said", [
    (["v=500"], "there is no size 'v'; accepted: K, V, rows"),
    (["V=-1"], "accepted: such as N=1024"),
])  # fmt: skip
def test_a_wrong_size_is_a_wrong_usage(arguments, said):
    run = alone(*arguments, "--smoke", "--device", "numpy")
    assert run.returncode == 2 and said in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize("command", ["-m gpuattn.lecture.c17_variance", "-m gpuattn lecture 17"])
def test_a_reader_that_stops_early_is_no_error(tmp_path, command):
    arguments = [sys.executable, *command.split(), "--smoke", "--device", "numpy"]
    run = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(chapters.FOLDER.parents[1])},
    )  # fmt: skip
    run.stdout.close()
    assert (run.wait(), run.stderr.read()) == (0, "")


def test_an_import_runs_a_chapter_in_silence(capsys):
    import gpuattn.lecture.c17_variance as chapter

    assert chapter.say.statements and not capsys.readouterr().out


def test_chapters_are_chosen_by_number_or_word():
    every = list(chapters.chapters().values())
    assert choose([]) == every
    assert [c.number for c in choose(["22", "7", "beam"])] == [7, 22]
    assert [c.number for c in choose(["c09_tiles"])] == [9]


def test_a_docstring_is_a_title_and_fields():
    doc = "3. A title: short\n\nClaim: one\nof two lines.\nQuestion: why?\n"
    fields = {"Claim": "One of two lines.", "Question": "why?"}
    assert read_doc(doc) == (3, "A title: short", fields)


def test_the_code_of_a_file_is_without_comments():
    text = '# %% [markdown]\n# Text.\n\nx = f"#{1}"  # why\ny = """\n# kept\n"""\n'
    assert chapters.code_of(text) == 'x = f"#{1}"\ny = """\n# kept\n"""'
