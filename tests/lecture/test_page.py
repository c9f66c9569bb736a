"""The page: every claim, no script, no link, small, whole; another machine's record beside."""

import copy
import re
from html.parser import HTMLParser

import pytest

from gpuattn.lecture.harness.chapters import chapters
from gpuattn.lecture.harness.claims import load
from gpuattn.lecture.harness.page import render, write_page
from gpuattn.lecture.harness.record import stale

VOID = {"meta", "br"}
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "small", "p", "b", "span", "div",
    "section", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "pre", "code",
    "figure", "figcaption", "svg", "g", "line", "polyline", "circle", "rect", "text",
}  # fmt: skip


class Reader(HTMLParser):
    """Checks that elements are closed in order; keeps tags and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.given = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.given.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(smoke):
    return render(smoke)


def test_the_page_is_one_small_file_without_script_or_link(smoke, tmp_path):
    write_page(tmp_path / "lecture.html", smoke)
    text = (tmp_path / "lecture.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 1 << 20
    reader = Reader(text)
    assert set(reader.tags) <= ALLOWED
    for _, given in reader.given:
        assert not {"href", "src"} & set(given) and not any(n.startswith("on") for n in given)
    assert "url(" not in text and "@import" not in text


def test_every_claim_is_on_the_page_once(page):
    for id, claim in load()[1].items():
        assert len(re.findall(rf"<b>{id} </b>", page)) == 1, id
        assert claim.place


def test_figures_say_in_words_what_they_show(page):
    drawn = [given for tag, given in Reader(page).given if tag == "svg"]
    assert len(drawn) >= len(chapters())
    assert all(len(given["aria-label"]) > 10 for given in drawn)


def test_the_page_follows_the_theme_and_fits_a_phone(page):
    assert "prefers-color-scheme: dark" in page and "max-width: 640px" in page
    assert 'name="viewport"' in page


def test_a_chapter_has_its_question_code_and_command(page):
    for chapter in chapters().values():
        assert chapter.fields["Vary"] in page
        assert f"<summary>Predict: {chapter.fields['Question'][:20]}" in page
    assert page.count("<details>") == 2 * len(chapters())


def test_another_record_has_a_column(smoke):
    other = copy.deepcopy(smoke) | {"where": "a <card>", "gpu": "a card"}
    entry = other["chapters"][0]
    entry["statements"][0]["got"] = 77077
    gone = other["chapters"].pop()
    text = render(smoke, other)
    assert "a &lt;card&gt;" in text and text.count("77,077") == 1
    assert 'data-name="a card"' in text and "The figures of a card" in text
    alone = render(smoke | {"chapters": []}, other)  # chapters that ran only there
    assert "here it was not run" in alone and f">{gone['number']}. {gone['title']}" not in alone
    Reader(alone)


def test_statements_of_a_claim_stay_together(smoke):
    mixed = copy.deepcopy(smoke)
    statements = mixed["chapters"][1]["statements"]
    first, last = statements[0], statements[-1]
    assert first["id"] != last["id"]
    statements.append(first | {"what": "said later", "got": 77077})
    text = render(mixed)
    assert text.index("said later") < text.index(f"<b>{last['id']} </b>")


def test_an_unknown_claim_is_left_out(smoke):
    other = copy.deepcopy(smoke)
    other["chapters"][0]["statements"][0]["id"] = "Z99"
    assert "Z99" not in render(smoke, other)
    assert "unknown here: Z99" in " ".join(stale(other))


def test_what_failed_is_marked(smoke):
    broken = copy.deepcopy(smoke)
    broken["chapters"][0]["statements"][0]["verdict"] = "fails"
    broken["chapters"][1]["error"] = "ValueError: <no>"
    text = render(broken)
    assert text.count('class="fails"') == 2 and "ValueError: &lt;no&gt;" in text
    assert "1 fails" in text


def test_a_page_without_chapters_lists_all_claims(smoke):
    assert "Not shown here: 120 claims" in render(smoke | {"chapters": []})
