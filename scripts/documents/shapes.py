"""Shapes of the pictures in the documents, as text of SVG."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

INK, GREY, PAPER, PANEL = "#111827", "#4b5563", "#ffffff", "#f3f4f6"


def text(
    x: float, y: float, words: str, *, size: int = 15, weight: str = "normal", fill: str = INK, anchor: str = "middle"
) -> str:
    """Return a line of text whose middle, or the end that ``anchor`` names, is ``x`` and whose base line is ``y``."""
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, *, fill: str, stroke: str = GREY) -> str:
    """Return a rectangle with round corners."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, stroke: str, head: str, *, width: float = 2) -> str:
    """Return a straight arrow; ``head`` names the marker at its end."""
    line = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {line} stroke="{stroke}" stroke-width="{width:g}" marker-end="url(#{head})"/>'


def markers(heads: Iterable[tuple[str, str]]) -> list[str]:
    """Return the heads of arrows; each has a name and a colour."""
    shape = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto"'
    path = "M 0 1 L 10 5 L 0 9 z"
    drawn = [f'<marker id="{name}" {shape}><path d="{path}" fill="{fill}"/></marker>' for name, fill in heads]
    return ["<defs>", *drawn, "</defs>"]


def picture(width: int, height: int, title: str, heads: Iterable[tuple[str, str]], parts: Iterable[str]) -> str:
    """Return a whole SVG; it has a light background, so that it is legible on dark pages too."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        *markers(heads),
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
