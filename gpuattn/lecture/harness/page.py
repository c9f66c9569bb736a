"""The page of a record: each claim beside what a machine measured. One file, no script, no link."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuattn.files import write_text
from gpuattn.lecture.harness.chapters import chapters
from gpuattn.lecture.harness.claims import load
from gpuattn.lecture.harness.record import entry_of, reasons, statements_of
from gpuattn.lecture.harness.say import FAILS, figure, text
from gpuattn.report import svg
from gpuattn.report.markup import tag
from gpuattn.report.style import document
from gpuattn.typing import StrPath

TITLE = "The living lecture"
STYLE = """
.claims td[data-name=verdict] { white-space: nowrap; } .fails { color: #c22; font-weight: bold; }
.map svg { width: auto; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--dim); }
h2 small { font-weight: normal; color: var(--dim); } .why { color: var(--dim); }
section > .charts { margin: 1rem 0; }
@media (max-width: 640px) {
  .claims thead { display: none; } .claims td { display: block; border: 0; padding: .1rem 0; }
  .claims tr { display: block; border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .claims td[data-name]::before { content: attr(data-name) ": "; color: var(--dim); } }
"""
INTRODUCTION = (
    "Five texts explain how attention is made fast. They make 120 claims. Here each claim stands "
    "beside what one machine computed and measured. Claim B06 is of text B; the texts are listed "
    "at the end. Printed: the figure in the text, or what its formula gives. Here: the figure of "
    "this machine; a dash means that nothing was measured. The verdict says how they compare:"
)
VERDICTS = {
    "exact": "the figure is the printed one, to its last digit",
    "near": "the error is below the bound beside it",
    "order": "the first figure is below the second, as the text claims",
    "differs": "the text is wrong; the figure here is the right one, and the grey line says why",
    "record": "shown beside the printed figure, not judged: another machine, or the clock of a CPU",
    FAILS: "the claim does not hold on this machine",
}


def write_page(
    path: StrPath, record: Mapping[str, Any], beside: Mapping[str, Any] | None = None
) -> None:
    """Write the page of a record; ``beside``: the record of another machine, in a column."""
    write_text(path, render(record, beside))


def render(record: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> str:
    """Return the page as text."""
    missing = reasons(record)
    counts = Counter(s["verdict"] for entry in record["chapters"] for s in entry["statements"])
    counted = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    shown = len(load()[1]) - len(missing)
    small = " Small sizes (--smoke)." if record["smoke"] else ""
    version = record["versions"]["gpuattn"]
    body = [
        tag("h1", TITLE),
        tag("p", f"{shown} of {len(load()[1])} claims shown: {counted or 'none'}.",
            class_="verdict"),
        tag("p", f"{record['where']}. gpuattn {version}, {record['date']}.{small}",
            class_="dim head"),
        tag("p", f"Beside it: {beside['where']}. gpuattn {beside['versions']['gpuattn']}, "
            f"{beside['date']}.", class_="dim head") if beside else None,
        tag("p", INTRODUCTION),
        tag("table", [tag("tr", tag("td", tag("b", name)), tag("td", meaning))
                      for name, meaning in VERDICTS.items()]),
        [_chapter(chapter, record, beside) for chapter in chapters().values()],
        _absent(missing, beside),
        _sources(),
    ]  # fmt: skip
    return document(TITLE, body, STYLE)


def _chapter(chapter, record, beside):
    """Return the section of a chapter that ran here, or in the record beside; else None."""
    entry, other = entry_of(record, chapter.number), beside and entry_of(beside, chapter.number)
    if not (entry or other):
        return None
    fields, ran = chapter.fields, entry or other
    question = tag("summary", f"Predict: {fields['Question']}")
    drawn = [_drawn(chart) for chart in ran["figures"]]
    more = [_drawn(chart) for chart in other["figures"]] if entry and other else None
    where = "here" if entry else "there; here it was not run"
    return tag(
        "section",
        tag("h2", f"{chapter.number}. {chapter.title} ", tag("small", fields["Regime"])),
        tag("p", fields["Claim"]),
        tag("details", question, tag("p", fields["Answer"])),
        tag("p", f"The chapter ended with {ran['error']}", class_="fails")
        if ran["error"] else None,
        _table(entry, other, _name(beside)),
        tag("div", drawn, class_="charts") if drawn else None,
        tag("details", tag("summary", f"The figures of {_name(beside)}"),
            tag("div", more, class_="charts")) if more else None,
        tag("p", "Vary it: ", tag("code", fields["Vary"])),
        tag("details", tag("summary", f"The code, {ran['seconds']:.1f} s {where}"),
            tag("pre", chapter.source)),
    )  # fmt: skip


def _name(beside):
    """Return the name of the column of the record beside, or None."""
    return beside and (beside["gpu"] or "there")


def _table(entry, other, there_name):
    """Return the statements of a chapter: printed, in the record beside, here."""
    here, there = (
        {(s["id"], s["what"]): s for s in found["statements"]} if found else {}
        for found in (entry, other)
    )
    names = ["claim", "printed", *([there_name] if there_name else []), "here", "verdict"]
    claims, told, body = load()[1], [], []
    said = [pair for pair in dict.fromkeys([*here, *there]) if pair[0] in claims]
    first = {id: place for place, (id, _) in reversed(list(enumerate(said)))}
    for id, what in sorted(said, key=lambda pair: first[pair[0]]):  # a claim's stay together
        mine, theirs = here.get((id, what)), there.get((id, what))
        if id not in told:
            told.append(id)
            body.append(tag("tr", tag("td", *_about(claims[id]), colspan=len(names))))
        cells = {"printed": text((mine or theirs).get("printed"))}
        if there_name:
            cells[there_name] = _got(theirs)
        cells["here"] = _got(mine)
        verdict = (mine or theirs)["verdict"]
        body.append(tag(
            "tr", tag("td", what), [tag("td", cells[name], data_name=name) for name in cells],
            tag("td", verdict, data_name="verdict", class_="fails" if verdict == FAILS else None),
        ))  # fmt: skip
    head = tag("thead", tag("tr", [tag("th", name) for name in names]))
    return tag("table", head, tag("tbody", body), class_="claims") if body else None


def _about(claim):
    place = tag("span", f"({claim.place})", class_="dim")
    why = tag("div", claim.why, class_="why") if claim.why else None
    return tag("b", f"{claim.id} "), f"{claim.claim} ", place, why


def _got(statement):
    if statement is None:
        return "-"
    return figure(statement)


def _drawn(chart):
    facts = {name: value for name, value in chart.items() if name not in ("kind", "title", "alt")}
    title, alt = chart["title"], chart["alt"]
    if chart["kind"] == "curves":
        return svg.titled(title, svg.curves(facts.pop("series"), alt=alt, **facts))
    if chart["kind"] == "bars":
        return svg.titled(title, svg.named_bars(facts["rows"], grey=facts["grey"], alt=alt))
    weights = np.asarray(facts["weights"])
    return tag("div", svg.heat_map(weights, facts["rows"], facts["columns"], title, alt),
               class_="map")  # fmt: skip


def _absent(missing, beside):
    """Return the table of claims without a statement, with the reason of each."""
    if not missing:
        return None
    claims = load()[1]
    rows = [
        tag("tr", tag("td", *_about(claims[id])),
            tag("td", _printed(claims[id]), data_name="printed"),
            tag("td", reason + _elsewhere(claims[id], beside), data_name="reason"))
        for id, reason in missing.items()
    ]  # fmt: skip
    head = tag("thead", tag("tr", [tag("th", name) for name in ("claim", "printed", "reason")]))
    table = tag("table", head, tag("tbody", rows), class_="claims")
    return tag("section", tag("h2", f"Not shown here: {len(missing)} claims"), table)


def _elsewhere(claim, beside):
    """Return where the page shows a claim that this machine does not."""
    if not statements_of(beside, claim.id):
        return ""
    return f"; chapter {claim.chapter} shows it of {_name(beside)}"


def _printed(claim):
    return "; ".join(f"{name}: {text(value)}" for name, value in claim.printed.items()) or "-"


def _sources():
    rows = [tag("p", tag("b", f"{letter} "), name) for letter, name in load()[0].items()]
    return tag("section", tag("h2", "The texts"), rows)
