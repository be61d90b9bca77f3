"""The sources of all kernels of the package, of which no two have the same name; their code as the package has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mpicomm
from mpicomm.kernels.variant import KERNEL_DIR

PACKAGE = Path(mpicomm.__file__).parent
SOURCES = {path.name: path for path in sorted(PACKAGE.rglob("*.cu"))}
_PUBLIC = KERNEL_DIR / "include"
HEADERS = {path.name: path for path in sorted(PACKAGE.rglob("*.cuh")) if not path.is_relative_to(_PUBLIC)}
DIRECTORIES = sorted({KERNEL_DIR, *(path.parent for path in SOURCES.values())})
INCLUDES = tuple(f"-I{directory}" for directory in DIRECTORIES)


def compile_kernel(source: Path, compute_capability: tuple[int, int], options: Sequence[str] = ()) -> bytes:
    from mpicomm.devices.cuda.compile import Code  # it needs cuda-bindings

    return Code(source, compute_capability, options).get()
