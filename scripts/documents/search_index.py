"""The entries of the search box of the site: sections of documents, and names of the API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

_HEADING = re.compile(r'<h([1-3]) id="([^"]*)">(.*?)</h\1>', re.DOTALL)
_ROW = re.compile(r'<tr id="([^"]*)">(.*?)</tr>', re.DOTALL)
_LEFT_OUT = re.compile(r"<details>.*?</details>|<style>.*?</style>", re.DOTALL)
_WITHIN_WORDS = re.compile(r"</?(?:a|code|em|span|strong)\b[^>]*>")

Entry = dict[str, str]
"""A title, the title of its page, an address below the root of the site, and a text."""


def entry(title: str, where: str, url: str, text: str) -> Entry:
    """Return an entry."""
    return {"title": title, "where": where, "url": url, "text": text}


def plain(html: str) -> str:
    """Return the text of HTML."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", _WITHIN_WORDS.sub("", html))).split())


def headings(html: str, level: int) -> list[tuple[str, str]]:
    """Return the anchor and the text of each heading of a level."""
    return [(anchor, plain(text)) for found, anchor, text in _HEADING.findall(html) if int(found) == level]


def sections(html: str, page: str, title: str) -> Iterator[Entry]:
    """Return an entry for each heading of a document, and for each row of a table with an anchor."""
    html = _LEFT_OUT.sub("", html)
    found = list(_HEADING.finditer(html))
    for heading, following in zip(found, [*found[1:], None], strict=True):
        text = html[heading.end() : following.start() if following else len(html)]
        yield entry(plain(heading[3]), title, f"{page}#{heading[2]}", plain(text))
    for row in _ROW.finditer(html):
        yield entry(row[1], title, f"{page}#{row[1]}", plain(row[2]))
