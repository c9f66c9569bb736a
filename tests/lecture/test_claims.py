"""Each of the 120 claims is data: complete, in one chapter, and judged by a known kind."""

import collections

from gpuattn.lecture.harness.chapters import chapters
from gpuattn.lecture.harness.claims import FILE, load
from gpuattn.lecture.harness.record import reasons

KINDS = {"exact", "near", "order", "differs", "record"}
COUNTS = {"A": 17, "B": 26, "C": 21, "D": 33, "E": 23}


def test_there_are_120_claims_of_five_sources():
    sources, claims = load()
    assert set(sources) == set(COUNTS)
    assert collections.Counter(id[0] for id in claims) == COUNTS
    assert len(claims) == FILE.read_text().count("\n[") - 1  # [sources]: no id stands twice


def test_each_claim_is_whole():
    for id, claim in load()[1].items():
        assert claim.kind in KINDS and claim.place and claim.claim.endswith("."), id
        assert 1 <= claim.chapter <= 24, id
        assert set(claim.right) <= set(claim.printed), id
        assert claim.why or claim.kind not in ("differs", "record"), id  # the reason


def test_each_claim_is_in_one_chapter_or_has_its_reason(smoke):
    said = collections.defaultdict(set)
    for entry in smoke["chapters"]:
        for statement in entry["statements"]:
            said[statement["id"]].add(entry["number"])
    missing, claims = reasons(smoke), load()[1]
    assert set(said) | set(missing) == set(claims) and not set(said) & set(missing)
    for id, claim in claims.items():
        if id in said:
            assert said[id] == {claim.chapter}, id
        elif claim.chapter in chapters():  # built: only a machine can be lacking
            assert claim.needs and missing[id] == f"needs {claim.needs}", id
        else:
            assert missing[id].startswith(f"not built yet: chapter {claim.chapter}"), id


def test_no_statement_hides_another(smoke):
    for entry in smoke["chapters"]:
        said = collections.Counter((s["id"], s["what"]) for s in entry["statements"])
        assert max(said.values()) == 1, said.most_common(1)


def test_each_printed_figure_of_a_built_chapter_is_compared(smoke):
    shown = {(s["id"], s["what"]) for entry in smoke["chapters"] for s in entry["statements"]}
    missing = reasons(smoke)
    for id, claim in load()[1].items():
        if id not in missing:
            assert {(id, what) for what in claim.printed} <= shown, id
