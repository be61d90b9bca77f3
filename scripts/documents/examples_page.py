"""Make an HTML page of the examples: `python scripts/documents/examples_page.py FOLDER [--ranks N]`, from scripts/docs.

It runs each program that examples/README.md lists, and shows its text, its code, its output and its picture.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from html import escape
from pathlib import Path

import pdoc.render_helpers
import pygments
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer, PythonLexer

from tests.helpers.jobs.mpiexec import ROOT, run_job

EXAMPLES = ROOT / "examples"
MISSING = re.compile(r"this example needs .*?(?=this example needs|$)", re.MULTILINE)
CODE = HtmlFormatter(cssclass="code")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { font-size: 13px; line-height: 1.4; padding: .8rem; overflow-x: auto; background: #f6f8fa; border-radius: 4px; }
img { max-width: 100%; }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid #ddd; padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
section { border-top: 2px solid #ddd; margin-top: 2.5rem; }
summary { cursor: pointer; }
"""


def listed() -> list[str]:
    """Return the names of the programs in the order of examples/README.md."""
    return re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)


def run(name: str, ranks: int, folder: Path) -> tuple[str, str]:
    """Run an example; return the command with its output, and the name of its picture, or "".

    An example that lacks a package or a GPU has its reason as output. Any other failure ends this program.
    """
    program = EXAMPLES / f"{name}.py"
    command, picture, options = f"$ mpirun -np {ranks} python examples/{name}.py", "", []
    if '"--plot"' in program.read_text():
        picture = f"{name}.svg"
        command, options = f"{command} --plot {picture}", [f"--plot={folder / picture}"]
    job = run_job(ranks, str(program), *options)
    if job.returncode == 0:
        return f"{command}\n{job.stdout}", picture
    missing = MISSING.search(job.stderr)  # ranks write their lines into one another
    if not missing:
        sys.exit(f"{command}\n{job.stdout}{job.stderr}")
    return f"{command}\n{missing[0]}\n", ""


def section(name: str, ranks: int, folder: Path) -> str:
    """Return the part of the page for an example."""
    source = (EXAMPLES / f"{name}.py").read_text()
    text = pdoc.render_helpers.to_html(ast.get_docstring(ast.parse(source)) or "")
    output, picture = run(name, ranks, folder)
    code = pygments.highlight(source, PythonLexer(), CODE)
    kernel = EXAMPLES / f"{name}.cu"
    if kernel.exists():
        code += f"<p><code>{kernel.name}</code></p>" + pygments.highlight(kernel.read_text(), CudaLexer(), CODE)
    return "\n".join(
        [
            f'<section id="{name}"><h2>{name}.py</h2>{text}<pre>{escape(output)}</pre>',
            f'<p><img src="{picture}" alt="what {name}.py draws"></p>' if picture else "",
            f"<details open><summary>Code</summary>{code}</details></section>",
        ]
    )


def main() -> None:
    """Write examples.html and the pictures into the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    readme = (EXAMPLES / "README.md").read_text()
    # On this page a link to a program leads to its section.
    start = pdoc.render_helpers.to_html(re.sub(r"\((\w+)\.py\)", r"(#\1)", readme))
    sections = []
    for name in listed():
        sys.stderr.write(f"running examples/{name}.py\n")
        sections.append(section(name, options.ranks, options.folder))
    style = STYLE + CODE.get_style_defs(".code")
    page = [
        f'<!doctype html><html><head><meta charset="utf-8"><title>Examples</title><style>{style}</style></head>',
        f'<body><p><a href="mpicomm.html">API reference</a></p>{start}',
        *sections,
        "</body></html>\n",
    ]
    (options.folder / "examples.html").write_text("\n".join(page))


if __name__ == "__main__":
    main()
