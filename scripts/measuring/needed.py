"""Packages that a script needs: `from needed import cupy` stands above all imports that load the package.

If the package is missing, the script still answers --help, and any other call says which package to install.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_EXTRAS = {"cupy": "cuda13 or cuda12", "torch": "torch"}
"""The extras of mpicomm that have the packages."""


def __getattr__(name: str) -> Any:
    if name not in _EXTRAS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if {"-h", "--help"}.intersection(sys.argv[1:]):
            sys.stdout.write(sys.modules["__main__"].__doc__ or "")
            sys.exit()
        sys.exit(f"{sys.argv[0]} needs {name}: {error}; install the extra {_EXTRAS[name]} of mpicomm")
