"""Markdown of the repository as HTML. Headings have the anchors of GitHub."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import markdown2
from pdoc.render_helpers import markdown_extensions

EXTRAS = {name: value for name, value in markdown_extensions.items() if name != "link-patterns"}
"""The Markdown of pdoc's docstrings, in which only links are links."""
ROW = re.compile(r"<tr>\s*<td>(?=<code>([A-Z]+_[A-Z_]+)</code></td>)")
"""The beginning of a row of a table that explains a variable; it gets the name of the variable as its anchor."""
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class _Markdown(markdown2.Markdown):  # type: ignore[misc]
    """Links of the documents hold on GitHub and in the site, because the anchors of headings are the same."""

    def __init__(self) -> None:
        super().__init__(extras={**EXTRAS, "link-shortrefs": None})
        self._anchors: Counter[str] = Counter()

    def header_id_from_text(self, text: str, prefix: str, n: Any = None) -> str:
        """Return the anchor of a heading; markdown2 calls this method."""
        name = re.sub(r"[^\w\- ]", "", _LINK.sub(r"\1", text).strip().lower()).replace(" ", "-")
        self._anchors[name] += 1
        return name if self._anchors[name] == 1 else f"{name}-{self._anchors[name] - 1}"


def to_html(text: str) -> str:
    """Return the HTML of a document. A table that is wider than the page scrolls by itself."""
    html = ROW.sub(r'<tr id="\1">\n  <td>', str(_Markdown().convert(text)))
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
