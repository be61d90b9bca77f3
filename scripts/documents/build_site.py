"""Build the site of the documents: `python scripts/documents/build_site.py [--no-runs] FOLDER`, from scripts/docs.

The site has the documents for users, the API reference, the examples and the documents for contributors. The script
runs the examples. Each page has a navigation and a search box. All pages work as files, without a server.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import examples_page
import pdoc.render
import reference
import search_index
from document_html import to_html
from document_links import within_site
from pdoc.render_helpers import defuse_unsafe_reprs
from pdoc.render_helpers import to_html as docstring_html

from tests.helpers.jobs.mpiexec import ROOT

DOCS = "mpicomm/docs"
TASKS = ("memory", "collectives", "reductions", "messages", "windows", "kernels", "streams", "experts", "products")
FOR_USERS = (
    *("guide", "installation", *TASKS, "torch", "several_nodes"),
    *("seeing_time", "troubles", "variables", "coming_from", "numbers"),
)
"""Documents of ``DOCS`` in the order of the navigation. Documents that are not named here follow."""
FOR_CONTRIBUTORS = (
    *(f"{DOCS}/architecture.md", "mpicomm/kernels/device_protocol.md"),
    *(".github/CONTRIBUTING.md", ".github/testing.md", ".github/adding.md"),
)
EXAMPLES = "examples/README.md"
TEMPLATES = Path(__file__).parent / "templates"

Navigation = list[tuple[str, list[tuple[str, str]]]]
"""The groups of pages. A page has a title and a path."""


def documents() -> dict[str, list[str]]:
    """Return the documents that are there by their groups in the navigation. The first document begins the site."""
    first = [f"{DOCS}/{name}.md" for name in FOR_USERS]
    more = sorted(f"{DOCS}/{path.name}" for path in (ROOT / DOCS).glob("*.md"))
    groups = {
        "Documents": [*first, *(path for path in more if path not in (*first, *FOR_CONTRIBUTORS))],
        "Examples and times": [EXAMPLES, "scripts/results/README.md"],
        "Project": ["README.md", *FOR_CONTRIBUTORS],
    }
    return {title: [path for path in paths if (ROOT / path).exists()] for title, paths in groups.items()}


def build(folder: Path, run: examples_page.Run) -> None:
    """Write the site into the folder; ``run`` runs the examples."""
    # mpi4py names types in annotations that only its stubs import.
    warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
    folder.mkdir(parents=True, exist_ok=True)
    pdoc.render.configure(template_directory=TEMPLATES, docformat="markdown", show_source=False)
    groups = documents()
    api = reference.pages()
    first = next(iter(groups.values()))[0]
    page_of = {source: _page_of(source) for group in groups.values() for source in group} | {first: "index.html"}
    navigation = [(name, [(_title_of(source), page_of[source]) for source in group]) for name, group in groups.items()]
    navigation.insert(1, ("API reference", [(name, _page_of_module(name)) for name in api]))
    entries = [*_write_documents(folder, page_of, run, navigation), *_write_reference(folder, api, navigation)]
    index = pdoc.render.env.get_template("search_index.js.jinja2").render(entries=json.dumps(entries))
    (folder / "search_index.js").write_text(index)


def _write_documents(
    folder: Path, page_of: dict[str, str], run: examples_page.Run, navigation: Navigation
) -> list[search_index.Entry]:
    """Write the pages of the documents, and return their entries for the search."""
    bodies = {source: to_html((ROOT / source).read_text()) for source in page_of if source != EXAMPLES}
    bodies[EXAMPLES] = examples_page.body(folder, run)
    targets = {**page_of, **_places_of_examples(folder)}
    entries: list[search_index.Entry] = []
    for source, page in page_of.items():
        title = _title_of(source)
        html = within_site(bodies[source], source, page, targets, ROOT, folder)
        _write(folder, page, "page", navigation, title=title, html=html, contents=search_index.headings(html, 2))
        entries += search_index.sections(html, page, title)
    return entries


def _write_reference(folder: Path, api: dict[str, reference.Page], navigation: Navigation) -> list[search_index.Entry]:
    """Write the pages of the API reference, and return their entries for the search."""
    members = [member for page in api.values() for member in page.members()]
    shared = {
        "all_modules": {name: page.module for name, page in api.items()},
        "public": {member.fullname for member in members},
        "classes": {member.name for member in members},
        "bases_of": reference.bases_of,
    }
    for name, page in api.items():
        contents = [(section.anchor, section.title) for section in page.sections if section.title]
        own = {"title": name, "module": page.module, "sections": page.sections, "contents": contents}
        _write(folder, _page_of_module(name), "reference", navigation, **shared, **own)
    return [
        search_index.entry(
            member.qualname,
            member.modulename,
            f"{_page_of_module(member.modulename)}#{member.qualname}",
            search_index.plain(docstring_html(member.docstring)),
        )
        for member in members
        if member.name != "__init__"
    ]


def _page_of_module(name: str) -> str:
    """Return the path at which pdoc's links expect the page of a module."""
    return f"{name.replace('.', '/')}.html"


def _page_of(source: str) -> str:
    """Return the path of a document's page; a README.md is named after its folder."""
    path = Path(source)
    name = path.parent.name or path.stem if path.stem == "README" else path.stem
    return f"{name.lower()}.html"


def _title_of(source: str) -> str:
    """Return the heading that begins a document; README.md has the name of the package, as a page of the API has."""
    return source if source == "README.md" else (ROOT / source).read_text().partition("\n")[0].lstrip("# ")


def _places_of_examples(folder: Path) -> dict[str, str]:
    """Return the places of the programs, the kernels and the pictures that the page of the examples shows."""
    programs = {
        f"examples/{name}{end}": f"examples.html#{name}" for name in examples_page.listed() for end in (".py", ".cu")
    }
    return {**programs, **{f"examples/{picture.name}": picture.name for picture in folder.glob("*.svg")}}


def _write(folder: Path, page: str, template: str, navigation: Navigation, **context: Any) -> None:
    (folder / page).parent.mkdir(parents=True, exist_ok=True)
    with defuse_unsafe_reprs():
        html = pdoc.render.env.get_template(f"{template}.html.jinja2").render(
            page=page, root="../" * page.count("/"), navigation=navigation, **context
        )
    (folder / page).write_text(html)


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-runs", action="store_true", help="show examples without output and pictures, in seconds")
    options = parser.parse_args()
    build(options.folder, examples_page.not_run if options.no_runs else examples_page.run)


if __name__ == "__main__":
    main()
