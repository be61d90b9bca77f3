"""The page of the examples: the text, the code, the output and the picture of each program in examples/README.md."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

import pygments
from document_html import to_html
from pdoc.render_helpers import formatter
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer, PythonLexer

from tests.helpers.jobs.mpiexec import ROOT, run_job

EXAMPLES = ROOT / "examples"
RANKS = 4
MISSING = re.compile(r"this example needs .*?(?=this example needs|$)", re.MULTILINE)
CODE = HtmlFormatter(cssclass=formatter.cssclass)

Run = Callable[[str, Path], tuple[str, str]]
"""Runs an example, and returns its output and the name of its picture in the folder, or ""."""


def listed() -> list[str]:
    """Return the names of the programs in the order of examples/README.md."""
    return re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)


def run(name: str, folder: Path) -> tuple[str, str]:
    """Run an example; return the command with its output, and the name of its picture, or "".

    The output of an example that lacks a package or a GPU is its reason. Any other failure ends this program.
    """
    sys.stderr.write(f"running examples/{name}.py\n")
    program = EXAMPLES / f"{name}.py"
    command, picture, options = f"$ mpirun -np {RANKS} python examples/{name}.py", "", []
    if '"--plot"' in program.read_text():
        picture = f"{name}.svg"
        command, options = f"{command} --plot {picture}", [f"--plot={folder / picture}"]
    job = run_job(RANKS, str(program), *options)
    if job.returncode == 0:
        return f"{command}\n{job.stdout}", picture
    missing = MISSING.search(job.stderr)  # ranks write their lines into one another
    if not missing:
        sys.exit(f"{command}\n{job.stdout}{job.stderr}")
    return f"{command}\n{missing[0]}\n", ""


def not_run(name: str, folder: Path) -> tuple[str, str]:
    """Return the command that runs an example, without output."""
    return f"$ mpirun -np {RANKS} python examples/{name}.py\n", ""


def body(folder: Path, run: Run) -> str:
    """Return the page, and write the pictures into the folder. Links stay as they are in examples/README.md."""
    text = (EXAMPLES / "README.md").read_text()
    return "\n".join([to_html(text), *(_section(name, *run(name, folder)) for name in listed())])


def _section(name: str, output: str, picture: str) -> str:
    source = (EXAMPLES / f"{name}.py").read_text()
    code = pygments.highlight(source, PythonLexer(), CODE)
    kernel = EXAMPLES / f"{name}.cu"
    if kernel.exists():
        code += f"<p><code>{kernel.name}</code></p>" + pygments.highlight(kernel.read_text(), CudaLexer(), CODE)
    return "\n".join(
        [
            f'<h2 id="{name}">{name}.py</h2>{to_html(ast.get_docstring(ast.parse(source)) or "")}',
            f"<pre>{escape(output)}</pre>",
            f'<p><img src="{picture}" alt="The picture that {name}.py draws"></p>' if picture else "",
            f"<details><summary>Code</summary>{code}</details>",
        ]
    )
