"""The sources of all kernels of the package; no two have the same name."""

from __future__ import annotations

from pathlib import Path

import mpicomm
from mpicomm.kernels.variant import SHARED

PACKAGE = Path(mpicomm.__file__).parent
SOURCES = {path.name: path for path in sorted(PACKAGE.rglob("*.cu"))}
HEADERS = {path.name: path for path in sorted(PACKAGE.rglob("*.cuh")) if not path.is_relative_to(SHARED / "include")}
DIRECTORIES = sorted({SHARED, *(path.parent for path in SOURCES.values())})
INCLUDES = tuple(f"-I{directory}" for directory in DIRECTORIES)
