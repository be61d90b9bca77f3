"""Changes of mpi4py's module and classes, for calls that do not know the objects of this package."""

from __future__ import annotations

import ctypes
import gc
from typing import Any


def replace(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute of the module or of a class of mpi4py. Return its old value."""
    if not isinstance(owner, type):
        original = getattr(owner, name)
        setattr(owner, name, value)
        return original
    # Classes of extension modules refuse changes. A subclass in the place of a class would differ from the class of
    # mpi4py's objects, and programs compare classes. So this changes the dictionary under the read-only view of the
    # class.
    (attributes,) = gc.get_referents(owner.__dict__)
    original = attributes[name]
    attributes[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))  # it clears the interpreter's cache of attributes
    return original
