"""Links of documents name files of the repository. Here they become links within the site."""

from __future__ import annotations

import os
import re
import shutil
from html import escape, unescape
from pathlib import Path

_LINK = re.compile(r'\b(href|src)="([^"]*)"')
_ELSEWHERE = re.compile(r"[a-z]+:|#|$")


def within_site(html: str, source: str, page: str, pages: dict[str, str], root: Path, folder: Path) -> str:
    """Return the HTML of the document ``source`` for the page ``page``; both are paths below ``root`` and ``folder``.

    ``pages`` has the page of each file that is shown in one, with an anchor or without. Every other file that the
    document names goes into ``files`` of the site. Exits if a link names no file.
    """

    def replaced(match: re.Match[str]) -> str:
        attribute, link = match[1], unescape(match[2])
        if _ELSEWHERE.match(link):
            return match[0]
        path, _, anchor = link.partition("#")
        file = os.path.normpath(Path(source).parent / path)
        if file in pages:
            target, _, place = pages[file].partition("#")
            anchor = anchor or place
        elif (root / file).is_file():
            target = f"files/{file}"
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, folder / target)
        else:
            raise SystemExit(f"{source} has a link to {link}, which is no file")
        relative = os.path.relpath(target, Path(page).parent)
        return f'{attribute}="{escape(relative + ("#" + anchor if anchor else ""))}"'

    return _LINK.sub(replaced, html)
