"""HTML and SVG as nested calls, in which every plain string is escaped."""

import html
from typing import Any

VOID = ("meta", "br")  # elements without an end


class Markup(str):
    """Text that is markup already."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Return the element ``name`` as Markup.

    Children: Markup, other values (escaped), lists of them, or None (left out). Attributes: those
    that are None are left out; ``class_`` is class, and ``stroke_width`` stroke-width.
    """
    shown = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    inside = "".join(
        f' {key}="{html.escape(_text(value))}"' for key, value in shown.items() if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{inside}>")
    return Markup(f"<{name}{inside}>{joined(children)}</{name}>")


def joined(children: Any) -> Markup:
    """Return children one behind the other, as Markup."""
    parts = []
    for child in children:
        if isinstance(child, list | tuple):
            parts.append(joined(child))
        elif child is not None:
            parts.append(child if isinstance(child, Markup) else Markup(html.escape(_text(child))))
    return Markup("".join(parts))


def picture(width: float, height: float, drawn: Any, alt: str | None = None) -> Markup:
    """Return an SVG of what is drawn. ``alt``: what it shows, for readers who do not see it."""
    box = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", drawn, viewBox=box, width=round(width), height=round(height), role="img",
               aria_label=alt)  # fmt: skip


def _text(value):
    """Return a value as text, without what neither HTML nor SVG may hold."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 0x7F <= ord(c) < 0xA0))
