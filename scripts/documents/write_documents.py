"""Write the documents that the package knows: `python scripts/documents/write_documents.py [--check]`.

They are troubles.md, from the checks of the doctor, and variables.md, from the environment variables that mpicomm
reads, both in mpicomm/docs. ``--check`` writes nothing and exits with 1 if a file differs from the text it would write.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpicomm import environment
from mpicomm.doctor import report

FOLDER = Path(__file__).resolve().parents[2] / "mpicomm/docs"
WRITERS = {"troubles.md": report.document, "variables.md": environment.document}


def main() -> int:
    """Write the files, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    options = parser.parse_args()
    wanted = {FOLDER / name: writer() for name, writer in WRITERS.items()}
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in differing:
        if not options.check:
            path.write_text(wanted[path])
        sys.stdout.write(f"{path}: {'differs from the package' if options.check else 'written'}\n")
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
