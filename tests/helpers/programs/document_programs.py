"""The programs in README.md and in mpicomm/docs, and a job that runs some of them one after the other.

Each ```python block of a document is a program, by these rules:

* A block that imports neither MPI nor mpicomm follows the first block of its document.
* A program without mpicomm runs as `python -m mpicomm` runs it, on Communicators.
* A program that says ``import cupy`` or ``import torch`` at the beginning of a line needs that package.
* The job frees what a program leaves: its ``comm``, and the process groups of PyTorch.

`python -m tests.helpers.programs.document_programs --write FOLDER` writes all programs into a folder, for mypy.
"""

from __future__ import annotations

import gc
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.jobs.mpiexec import ROOT, run_job

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "mpicomm/docs").glob("*.md")))
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Program:
    """A block, and the block that it follows."""

    document: str
    line: int
    source: str
    start: Program | None

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def needs(self) -> frozenset[str]:
        """The packages that not every environment of the tests has."""
        own = frozenset(re.findall(r"^import (cupy|torch)\b", self.source, re.MULTILINE))
        return own | self.start.needs if self.start else own

    def run(self, namespace: dict[str, Any]) -> None:
        """Run the program in a namespace; tracebacks have the lines of the document."""
        if self.start:
            self.start.run(namespace)
        exec(self.compiled(), namespace)

    def compiled(self) -> Any:
        return compile("\n" * self.line + self.source, str(ROOT / self.document), "exec")


def programs() -> Iterator[Program]:
    """Return the programs of all documents."""
    for document in DOCUMENTS:
        first = None
        text = document.read_text()
        for block in FENCE.finditer(text):
            line, source = text.count("\n", 0, block.start()) + 1, block[1]
            whole = re.search(r"^(from mpi4py|import mpicomm)", source, re.MULTILINE)
            program = Program(str(document.relative_to(ROOT)), line, source, None if whole else first)
            first = first or program
            yield program


def require_programs_run(nprocs: int, chosen: Sequence[Program], **variables: str) -> str:
    """Run programs in one job, and require that all of them end without an error. Return the job's stderr."""
    names = [program.name for program in chosen]
    with tempfile.TemporaryDirectory() as directory:
        ended = Path(directory, "ended")
        arguments = ("-m", "mpi4py", "-m", "tests.helpers.programs.document_programs", str(ended), *names)
        job = run_job(nprocs, *arguments, **variables)
        assert job.returncode == 0, job.stdout + job.stderr
        assert ended.read_text().splitlines() == names
    return job.stderr


def main() -> None:
    """Run the programs that the arguments name. Rank 0 writes the names of programs that have ended into a file."""
    from mpi4py import MPI

    import mpicomm

    _, ended, *names = sys.argv
    by_name = {program.name: program for program in programs()}
    for name in names:
        program = by_name[name]
        namespace: dict[str, Any] = {"__name__": "__main__"}
        knows_only_mpi4py = "mpicomm" not in program.source and not program.start
        if knows_only_mpi4py:
            mpicomm.install()
        program.run(namespace)
        free(namespace)
        if knows_only_mpi4py:
            mpicomm.uninstall()
        namespace.clear()
        gc.collect()  # warns of communicators that were not freed
        if MPI.COMM_WORLD.rank == 0:
            with Path(ended).open("a") as file:
                file.write(f"{name}\n")


def write(folder: Path) -> None:
    """Write the programs into a folder, for a type checker."""
    for program in programs():
        name = re.sub(r"\W", "_", program.name)
        start = f"{program.start.source}\n\n" if program.start else ""
        (folder / f"{name}.py").write_text(start + program.source)


def free(namespace: dict[str, Any]) -> None:
    """Free what a program leaves."""
    import mpicomm

    groups: Any = sys.modules.get("torch.distributed")
    if groups and groups.is_available() and groups.is_initialized():
        groups.destroy_process_group()
    comm = namespace.get("comm")
    if isinstance(comm, mpicomm.Communicator):
        comm.free()


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(Path(sys.argv[2]))
    else:
        main()
