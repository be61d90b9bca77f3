"""Scripts answer --help, files that scripts write are up to date, and the site shows what users need."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

import mpicomm
from tests.helpers.jobs.in_turn import run_in_turn
from tests.helpers.jobs.mpiexec import ROOT, run_command

SCRIPTS = ROOT / "scripts"
COMMANDS = [path for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK)]
WITH_HELP = re.compile(r"description=__doc__|measuring_parser\(__doc__")
PROGRAMS = [path for path in SCRIPTS.rglob("*.py") if WITH_HELP.search(path.read_text())]


def require_names_itself(script: Path, said: str) -> None:
    name = script.relative_to(ROOT)
    assert str(name) in said or name.stem in said, script


def test_each_command_answers_help_and_writes_nothing(tmp_path: Path) -> None:
    assert len(COMMANDS) == 5
    for command in COMMANDS:
        job = run_command(command, "--help", cwd=tmp_path)
        assert (job.returncode, job.stderr) == (0, ""), command
        require_names_itself(command, job.stdout)
    assert list(tmp_path.iterdir()) == []


def test_each_program_answers_help_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PROGRAMS) > 15
    monkeypatch.chdir(tmp_path)
    job, ended = run_in_turn(1, *((program, "--help") for program in PROGRAMS))
    assert (job.returncode, job.stderr) == (0, "")
    for program, (said, code) in zip(PROGRAMS, ended, strict=True):
        assert code == 0, program
        require_names_itself(program, said)
    assert list(tmp_path.iterdir()) == []


DOCS = ROOT / "mpicomm/docs"


@pytest.mark.parametrize(
    ("script", "target", "names", "options"),
    [
        ("chart.py", "allreduce.svg", ["allreduce.svg"], []),
        ("chart.py", "strided.svg", ["strided.svg"], ["--strided", "scripts/results/strided-2-h200.json"]),
        ("how_it_works.py", "how_it_works.svg", ["how_it_works.svg"], []),
        ("architecture.py", ".", ["rooms.svg", "way_of_a_call.svg"], []),
    ],
)
def test_the_pictures_are_up_to_date(
    tmp_path: Path, script: str, target: str, names: list[str], options: list[str]
) -> None:
    assert run_command(sys.executable, f"scripts/documents/{script}", tmp_path / target, *options).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text()


@pytest.mark.parametrize("script", ["scripts/results/tables.py", "scripts/write_stub.py"])
def test_the_files_are_up_to_date(script: str) -> None:
    result = run_command(sys.executable, script, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("changed", "marker"),
    [
        ("README.md", "<!-- headline table: end -->"),
        ("scripts/results/README.md", "## Overview"),
    ],
)
def test_a_figure_typed_by_hand_is_found(changed: str, marker: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts/results", tmp_path / "scripts/results")
    shutil.copy(ROOT / "README.md", tmp_path)
    path = tmp_path / changed
    changed_text = path.read_text().replace(marker, f"| 1 KiB | 0.01 |\n{marker}", 1)
    path.write_text(changed_text)
    result = run_command(sys.executable, tmp_path / "scripts/results/tables.py", "--check")
    assert (result.returncode, result.stdout) == (1, f"{path}: differs from the JSON files\n")
    assert path.read_text() == changed_text


def test_a_stub_changed_by_hand_is_found_and_written_again(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mpicomm", tmp_path / "mpicomm", ignore=shutil.ignore_patterns("__pycache__"))
    stub = tmp_path / "mpicomm/api/collectives.pyi"
    text = stub.read_text()
    stub.write_text(text.replace(", recvbuf: Any,", ", recvbuf: Any = None,"))
    result = run_command(sys.executable, "scripts/write_stub.py", "--check", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1 and result.stdout.startswith(f"{stub}: differs from the table")
    assert run_command(sys.executable, "scripts/write_stub.py", PYTHONPATH=str(tmp_path)).returncode == 0
    assert stub.read_text() == text


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
