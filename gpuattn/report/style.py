"""The look of a page, and the document around its body: no script, no link, light and dark."""

from typing import Any

from gpuattn.report.markup import Markup, tag

STYLE = """
:root { color-scheme: light dark; --ink: #222; --dim: #667; --paper: #fff; --line: #d8dbe0;
  --soft: #f4f5f7; --s0: #1f77b4; --s1: #d95f02; --s2: #5b8c3e;
  --s3: #8e5bb5; --s4: #a07800; --s5: #17807e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --dim: #99a; --paper: #16181c;
  --line: #353941; --soft: #1f2228; --s0: #6db3ec; --s1: #ff9a52; --s2: #93c572;
  --s3: #c79ae8; --s4: #e0b84c; --s5: #5cc8c6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1088px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.verdict { font-size: 1.15rem; margin: .3rem 0; } .dim, figcaption { color: var(--dim); }
.head { margin: 0; } figure { margin: 0; } figcaption { font-size: .85rem; }
.charts { display: grid; gap: 1.2rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--least, 400px)), 1fr)); }
svg { display: block; max-width: 100%; height: auto; } .charts svg { width: 100%; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } svg text.dim { fill: var(--dim); }
.name, .up, .row { text-anchor: end; } .across { text-anchor: middle; }
.grid { stroke: var(--line); } .tick, .lead { stroke: var(--dim); stroke-width: .7; }
.frame { fill: none; stroke: var(--line); } .roof { fill: none; stroke: var(--ink); }
.cell { fill: var(--s0); } .line { fill: none; stroke-width: 2; } .dot { fill-opacity: .8; }
.line.s0 { stroke: var(--s0); } .line.s1 { stroke: var(--s1); stroke-dasharray: 6 3; }
.dot.s0, svg text.s0 { fill: var(--s0); } .dot.s1, svg text.s1 { fill: var(--s1); }
.line.s2 { stroke: var(--s2); stroke-dasharray: 2 3; } .line.s3 { stroke: var(--s3); }
.dot.s2, svg text.s2 { fill: var(--s2); } .dot.s3, svg text.s3 { fill: var(--s3); }
.line.s4 { stroke: var(--s4); stroke-dasharray: 8 3 2 3; }
.line.s5 { stroke: var(--s5); stroke-dasharray: 1 3; }
.dot.s4, svg text.s4 { fill: var(--s4); } .dot.s5, svg text.s5 { fill: var(--s5); }
.ref { fill: var(--dim); fill-opacity: .6; }
.level { stroke: var(--dim); stroke-dasharray: 4 4; } .wide > svg { min-width: 800px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; } .right, .right th, td.n { text-align: right; white-space: nowrap; }
.columns { column-width: 21rem; } pre { background: var(--soft); padding: .8rem;
  overflow-x: auto; font-size: .8rem; white-space: pre-wrap; }
code { background: var(--soft); padding: 0 .25rem; }
"""


def document(title: str, body: Any, style: str = "") -> str:
    """Return a page with ``title`` as the text of a file. ``style``: more rules of CSS."""
    head = tag(
        "head", tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title), tag("style", Markup(STYLE + style)),
    )  # fmt: skip
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', body), lang='en')}\n"
