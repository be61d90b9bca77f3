"""Changes of mpi4py's module and classes, for calls that do not know what this package makes."""

from __future__ import annotations

import ctypes
import gc
from typing import Any


def replace(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute of the module or of a class of mpi4py; return what was there."""
    if not isinstance(owner, type):
        original = getattr(owner, name)
        setattr(owner, name, value)
        return original
    # Classes of extension modules refuse changes. A subclass in a class's place would not be the class of the objects
    # that mpi4py makes, and programs compare classes. So this changes the dictionary behind the class's read-only view.
    (attributes,) = gc.get_referents(owner.__dict__)
    original = attributes[name]
    attributes[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))  # it clears the interpreter's cache of attributes
    return original
