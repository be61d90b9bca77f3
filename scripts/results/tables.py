"""Write every measured table from the JSON files beside this script: `python scripts/results/tables.py [--check]`.

It writes README.md in this folder, and in the project's README.md the headline table and a figure, each between two
markers. ``--check`` writes nothing and exits with 1 if one of the two files differs from the text it would write.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from bench_tables import COLLECTIVES, anchor, behind, bench_section, bench_title, overview, place, versions_of
from cells import number, table
from headline import figure, headline

FOLDER = Path(__file__).resolve().parent
MARKED = {"figure": figure, "headline table": headline}
"""The writers of the parts of the project's README.md between markers of these names."""
GROUPS = ("Mapped memory", "Messages", "Calls", "Ways compared", "Reliability")
HEAD = """\
# Measured

This document is for users who compare mpicomm with other libraries. `python scripts/results/tables.py` writes it from
the JSON files beside it.

Times are microseconds: the slowest rank's median. "GB/s" is mpicomm's bus bandwidth. Sizes and bus bandwidths are as
nccl-tests counts them. The number in brackets is the peer's time divided by mpicomm's time, so above 1 mpicomm is
faster. Bold type marks a peer that is faster by more than 3 %, because two runs on one machine differ by up to 3 %.

"NCCL symm." is NCCL with symmetric windows. "torch" is the fastest way of PyTorch's symmetric memory. In columns "in
place" the result replaces the input. Symmetric arrays are parts of a `SymmetricArray`, so all ranks have mapped them.
Only its rank has mapped an ordinary array. NVLink SHARP, the multicast of the switch, was off for all libraries.
"""


def documents() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the results of the bench, and the other tables. A file may hold a list of tables.

    Each remembers the name of its file.
    """
    benches: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        for document in content if isinstance(content, list) else [content]:
            document["file"] = path.name
            (benches if "collective" in document else others).append(document)
    return sorted(benches, key=place), others


def common_versions(benches: list[dict[str, Any]]) -> dict[str, str]:
    """Return the versions that are the same in all runs of the bench that name them."""
    found: dict[str, set[str]] = {}
    for bench in benches:
        for name, version in versions_of(bench).items():
            found.setdefault(name, set()).add(version)
    return {name: versions.pop() for name, versions in found.items() if len(versions) == 1}


def other_section(document: dict[str, Any]) -> list[str]:
    """Return the lines of a table that is stored as columns and rows."""
    versions = "".join(f"; {name} {version}" for name, version in document["versions"].items())
    return [
        f"### {document['title']}",
        "",
        *([document["text"], ""] if document["text"] else []),
        f"{document['hardware']}. {document['date']}{versions}. [{document['file']}]({document['file']})",
        "",
        *([f"`{document['command']}`", ""] if document["command"] else []),
        *table(document["columns"], [[number(cell) for cell in row] for row in document["rows"]]),
        "",
        *(line for note in document["notes"] for line in (note, "")),
    ]


def all_tables() -> str:
    """Return the text of README.md in this folder."""
    benches, others = documents()
    versions = common_versions(benches)
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [HEAD, *textwrap.wrap(f"All runs of `python -m mpicomm.bench` have {listed}.", 120), "", "## Overview", ""]
    lines += ["Geometric means of the peer's time divided by mpicomm's time, out of place / in place.", ""]
    lines += [*overview(benches), "", "Peers are faster by more than 3 % here:", "", *behind(benches), ""]
    lines += ["Other tables:", ""]
    lines += [f"* [{group}](#{anchor(group)})" for group in GROUPS]
    lines += [""]
    for name, title in COLLECTIVES.items():
        found = [bench for bench in benches if bench["collective"] == name]
        lines += [f"## {title}", ""] if found else []
        for bench in found:
            lines += [f"### {bench_title(bench)}", "", *bench_section(bench, versions)]
    for group in GROUPS:
        lines += [f"## {group}", ""]
        for document in others:
            if document["group"] == group:
                lines += other_section(document)
    unknown = {document["group"] for document in others} - set(GROUPS)
    if unknown:
        raise SystemExit(f"no place for tables of {sorted(unknown)}")
    return "\n".join(lines).rstrip() + "\n"


def with_figures(readme: str) -> str:
    """Return the project's README.md with the figures of now between their markers."""
    benches, _ = documents()
    for name, lines in MARKED.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found_begin, rest = readme.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise SystemExit(f"README.md has no {begin} ... {end}")
        readme = "\n".join([before + begin, *lines(benches), end + after])
    return readme


def main() -> int:
    """Write the files, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    options = parser.parse_args()
    project = FOLDER.parents[1] / "README.md"
    wanted = {FOLDER / "README.md": all_tables(), project: with_figures(project.read_text())}
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in differing:
        if not options.check:
            path.write_text(wanted[path])
        sys.stdout.write(f"{path}: {'differs from the JSON files' if options.check else 'written'}\n")
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
