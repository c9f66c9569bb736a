"""A record goes on, names what it lacks, and can be judged again from its samples."""

import copy
import json

import pytest

from gpuattn.errors import CheckpointError, ConfigError, DataError
from gpuattn.lecture.harness import record
from gpuattn.lecture.harness.chapters import chapters
from gpuattn.lecture.harness.page import render
from gpuattn.lecture.harness.say import verdict


def test_verdicts_follow_from_the_record(smoke, tmp_path):
    record.write(tmp_path / "r.json", smoke)
    read = record.read(tmp_path / "r.json")
    assert read == json.loads(json.dumps(smoke, allow_nan=False))
    for entry in read["chapters"]:
        assert all(verdict(s) == s["verdict"] for s in entry["statements"])


def test_a_record_of_this_code_lacks_only_what_needs_a_gpu(smoke):
    assert not [c for c in chapters().values() if record.is_missing(smoke, c)]
    assert record.stale(smoke) == []
    (fault,) = record.stale(smoke | {"gpu": "a card"})
    assert fault == "without the claims C18, C21, E16"
    assert record.reasons(smoke)["E16"] == "needs a GPU"
    here = record.reasons(smoke | {"gpu": "a card"})
    assert here["E16"] == "not built yet: its part of chapter 5"
    assert here["B16"] == "needs a Hopper GPU"  # which this card may not be


def test_what_is_old_or_missing_is_named(smoke):
    old = copy.deepcopy(smoke)
    old["versions"]["gpuattn"] = "0.0.9"
    old["chapters"][0]["hash"] = "?"
    gone = old["chapters"].pop()
    faults = record.stale(old)
    assert "it is of gpuattn 0.0.9" in faults[0]
    assert faults[1] == f"other code made chapter {old['chapters'][0]['number']}"
    assert all(s["id"] in faults[2] for s in gone["statements"])
    assert record.is_missing(old, chapters()[gone["number"]])
    assert record.reasons(old)[gone["statements"][0]["id"]].endswith("was not run")


def test_an_error_in_a_chapter_is_the_reason_of_its_claims(smoke):
    broken = copy.deepcopy(smoke)
    broken["chapters"][0] |= {"error": "ValueError: no", "statements": []}
    chapter = chapters()[broken["chapters"][0]["number"]]
    assert record.is_missing(broken, chapter)
    assert record.reasons(broken)[chapter.claims[0]].endswith("ended with an error")


@pytest.mark.skipif(not record.stored(), reason="no record of a GPU is stored yet")
def test_the_stored_record_can_be_judged_again_and_shown(smoke):
    found = record.read(record.stored())
    assert found["gpu"] and not found["smoke"]
    for entry in found["chapters"]:
        assert entry["number"] in chapters() and not entry["error"]
        assert all(verdict(s) == s["verdict"] != "fails" for s in entry["statements"])
    text = render(smoke, found)
    assert found["where"] in text and len(text.encode()) < 1 << 20


def test_a_record_goes_on_where_it_can(smoke, tmp_path):
    path, fresh = tmp_path / "r.json", smoke | {"chapters": []}
    assert record.go_on(path, fresh, strict=True) == fresh  # no file
    record.write(path, smoke)
    assert record.go_on(path, fresh, strict=True)["chapters"] == smoke["chapters"]
    other = fresh | {"gpu": "another"}
    with pytest.raises(ConfigError, match="gpu None, not another: --missing cannot go on"):
        record.go_on(path, other, strict=True)
    with pytest.warns(UserWarning, match=r"r\.json was a record of gpu None, not another"):
        assert record.go_on(path, other, strict=False)["chapters"] == []
    assert not path.exists() and record.read(tmp_path / "r.old.json")["chapters"]


@pytest.mark.parametrize("text, said", [
    ("{", "is no record of gpuattn lecture"), ("[]", "without a format"),
    ('{"format": "gpuattn lecture/9"}', "of the format 'gpuattn lecture/9'"),
    ('{"format": "gpuattn lecture/1", "gpu": null}', "lacks digest, smoke, long, versions"),
])  # fmt: skip
def test_a_file_that_is_no_record_is_refused(tmp_path, text, said):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(DataError, match=said):
        record.read(tmp_path / "r.json")


def test_a_place_that_cannot_be_written_is_named(smoke, tmp_path):
    with pytest.raises(CheckpointError, match="none/r.json"):
        record.write(tmp_path / "none/r.json", smoke)


def test_chapters_stay_in_order_and_replace_older_ones(smoke):
    found = smoke | {"chapters": []}
    for number in (7, 2, 7):
        record.put(found, {"number": number, "seconds": number})
    assert [entry["number"] for entry in found["chapters"]] == [2, 7]
