"""The site of the documents: its links lead somewhere, and its pages and its search show what users need."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

import mpicomm
from tests.helpers.jobs.mpiexec import ROOT, run_command

ELSEWHERE = re.compile(r"(https?|mailto|data):")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = run_command(sys.executable, "scripts/documents/build_site.py", "--no-runs", str(folder))
    assert result.returncode == 0, result.stderr
    assert "does not resolve" not in result.stderr  # pdoc warns of a public name that it leaves out
    return folder


@cache
def anchors(page: Path) -> set[str]:
    return {unescape(name) for name in re.findall(r'\bid="([^"]*)"', page.read_text())}


def links(page: Path) -> set[str]:
    found = re.findall(r'<(?:a|img|script)\b[^>]*\b(?:href|src)="([^"]*)"', page.read_text())
    return {unescape(link) for link in found if not ELSEWHERE.match(link)}


def entries(site: Path) -> list[dict[str, str]]:
    script = (site / "search_index.js").read_text()
    found: list[dict[str, str]] = json.loads(script.partition("for (const entry of ")[2].partition(") {\n")[0])
    return found


def test_every_link_leads_to_a_page_or_a_file_and_to_its_anchor(site: Path) -> None:
    pages = {page: anchors(page) for page in site.rglob("*.html")}
    assert len(pages) > 8
    wrong = []
    for page in pages:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / unquote(path)).resolve() if path else page
            if not target.is_file() or (anchor and target in pages and unquote(anchor) not in pages[target]):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert wrong == []


def test_the_site_begins_with_the_first_document_and_each_page_has_all_others_in_its_navigation(site: Path) -> None:
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    documents = {f"{path.stem}.html" for path in (ROOT / "mpicomm/docs").glob("*.md")}
    assert len(documents - pages) == 1, "the first document is index.html"
    for page in pages:
        navigation = (site / page).read_text().partition("<main")[0]
        root = "../" * page.count("/")
        assert {link.removeprefix(root) for link in re.findall(r'href="([^"#]+)"', navigation)} >= pages - {page}


def test_the_reference_shows_public_names_and_no_others(site: Path) -> None:
    shown = anchors(site / "mpicomm.html")
    assert {*mpicomm.__all__} - {"__version__", "epilogues"} <= shown
    assert {"Communicator.Allreduce", "Communicator.Isend", "Communicator.stats", "SymmetricArray.put"} <= shown
    members = {name.rpartition(".")[2] for name in shown}
    assert not members & {"installed", "close_own", "close_peers", "memory_use", "BlockingCollectives"}
    assert not {name for name in members if name.startswith("_") and name != "__init__"}


def test_the_search_finds_documents_and_names(site: Path) -> None:
    found = {entry["title"]: entry for entry in entries(site)}
    assert found["Communicator.Allreduce"]["url"] == "mpicomm.html#Communicator.Allreduce"
    assert "element" in found["Communicator.Allreduce"]["text"]
    assert found["The program hangs"]["where"] == "Troubles"
    assert "mpicomm.doctor --pid" in found["The program hangs"]["text"]
    assert found["MPICOMM_TIMEOUT"]["url"] == "variables.html#MPICOMM_TIMEOUT", (
        "a title that equals the term comes first"
    )
    assert "30" in found["MPICOMM_TIMEOUT"]["text"]
    for term in ("wire_dtype", "Fence", "timeout_s"):
        assert any(term in entry["title"] + entry["text"] for entry in entries(site)), term
    assert "jacobi.py" in found and "mpicomm.Communicator" not in found["jacobi.py"]["text"], "code is left out"
    for entry in found.values():
        path, _, anchor = entry["url"].partition("#")
        assert anchor in anchors(site / path), entry["url"]


@pytest.mark.parametrize("link", ["missing.md", "../missing.py"])
def test_a_link_to_no_file_ends_the_build(link: str, tmp_path: Path) -> None:
    sys.path.append(str(ROOT / "scripts/documents"))
    from document_links import within_site

    html = f'<a href="{link}">x</a>'
    with pytest.raises(SystemExit, match=f"docs/a.md has a link to {link}, which is no file"):
        within_site(html, "docs/a.md", "a.html", {"docs/a.md": "a.html"}, tmp_path, tmp_path)
