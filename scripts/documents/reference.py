"""The public names of the package, grouped by purpose, for the API reference."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import pdoc.doc

import mpicomm
from mpicomm import Communicator
from mpicomm.api.collectives import NeighborCollectives
from mpicomm.api.communicator import RankInfo
from mpicomm.api.window import DeviceWindowCalls
from mpicomm.recording.record import Statistics

INTERNAL = frozenset(
    {
        "Communicator.installed",
        *(f"SymmetricArray.{name}" for name in ("__init__", "close_own", "close_peers", "memory_use")),
        *(f"SharedEvent.{name}" for name in ("__init__", "close_own", "close_peers", "memory_use")),
        *(f"Received.{name}" for name in ("__init__", "empty", "pointers", "on_device")),
        *("RankInfo.__init__", "Statistics.__init__"),
        *("Redistribution.__init__", "Split.boxes", "Split.__init__"),
        *("Epilogue.key", "Epilogue.bind", "Elementwise.key", "Elementwise.bind", "Elementwise.read"),
    }
)
"""Names that look public. Other rooms of the package call them, and users do not."""
UNEXPORTED = (DeviceWindowCalls, NeighborCollectives, RankInfo, Statistics)
"""Classes of objects that calls return."""
ELSEWHERE = frozenset({"__version__", "epilogues"})
"""Names of the package that need no section, or have a page."""


@dataclass(frozen=True)
class Purpose:
    """A section of the reference: names of the package, and methods of a Communicator."""

    title: str
    names: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    """The classes that define the methods; a method that ``names`` of any purpose has is only there."""
    text: str = ""


PURPOSES = (
    Purpose("The communicator", ("Communicator", "Communicator.__init__"), ("Communicator", "Lifetime")),
    Purpose(
        "Where ranks are and what they call", ("Communicator.describe", "RankInfo", "Communicator.stats", "Statistics")
    ),
    Purpose(
        "Memory of other ranks",
        (
            *("Communicator.empty", "Communicator.zeros", "Communicator.register", "SymmetricArray"),
            *("Communicator.shared_event", "SharedEvent", "include_dir"),
            *("Communicator.suspend", "Communicator.resume"),
        ),
    ),
    Purpose(
        "Windows",
        ("Win", "DeviceWindowCalls"),
        text="A window of device memory has the calls of `DeviceWindowCalls`.",
    ),
    Purpose("Collectives", classes=("BlockingCollectives",)),
    Purpose("Nonblocking collectives", classes=("NonblockingCollectives",)),
    Purpose("Persistent collectives", classes=("PersistentCollectives",)),
    Purpose(
        "Collectives of neighbours",
        ("NeighborCollectives",),
        text="Communicators of `Create_cart`, `Create_graph`, `Create_dist_graph` and `Create_dist_graph_adjacent` "
        "have these methods.",
    ),
    Purpose("Splits of arrays", ("Split", "Redistribution"), ("RedistributionCalls",)),
    Purpose("Matrix products", classes=("ProductCalls",)),
    Purpose("Mixture of experts", ("Experts", "Received")),
    Purpose(
        "Operations", ("AVG", "Op", "tree_sum"), text="Epilogues are in [mpicomm.epilogues](mpicomm/epilogues.html)."
    ),
    Purpose("Messages", classes=("PointToPoint", "Probes")),
    Purpose("Python objects", classes=("ObjectCalls",)),
    Purpose("Making communicators", classes=("Constructors",)),
    Purpose(
        "Calls of MPI",
        classes=("HostStaging",),
        text="MPI carries these calls out. Device arrays go through pinned host memory.",
    ),
    Purpose("Unchanged programs", ("install", "uninstall")),
    Purpose(
        "Errors",
        (
            *("MpicommError", "InvalidUsageError", "HandleError", "PeerError", "CollectiveTimeoutError"),
            *("BackendUnavailableError", "KernelCompileError"),
        ),
    ),
)


@dataclass
class Section:
    """A section of a page. A member is a class with its public members, or anything else without members."""

    title: str = ""
    text: str = ""
    members: list[tuple[pdoc.doc.Doc[Any], list[pdoc.doc.Doc[Any]]]] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The anchor of the title."""
        return self.title.lower().replace(" ", "-")


@dataclass
class Page:
    """The page of a module."""

    module: pdoc.doc.Module
    sections: list[Section]

    def members(self) -> Iterator[pdoc.doc.Doc[Any]]:
        """Return all public members."""
        for section in self.sections:
            for member, inner in section.members:
                yield member
                yield from inner


def pages() -> dict[str, Page]:
    """Return the pages by the names of their modules. Without PyTorch there is no page of `mpicomm.torch`."""
    for cls in (Communicator, NeighborCollectives):
        inspect.getmembers(cls)  # pdoc looks into classes, where collectives are compiled only when they are looked up
    found = {"mpicomm": _package(), "mpicomm.epilogues": _module("mpicomm.epilogues")}
    if importlib.util.find_spec("torch"):
        found["mpicomm.torch"] = _module("mpicomm.torch")
    else:
        sys.stderr.write("without PyTorch the reference has no page of mpicomm.torch\n")
    return found


def bases_of(cls: type, public: Container[str]) -> list[str]:
    """Return the names of the nearest bases of a class that are public, or not of mpicomm."""
    found: list[type] = []
    for base in cls.__mro__[1:-1]:
        shown = base.__name__ in public if base.__module__.startswith("mpicomm") else base.__module__ != "abc"
        if shown and not any(issubclass(near, base) for near in found):
            found.append(base)
    return [base.__name__ if base.__name__ in public else f"{base.__module__}.{base.__name__}" for base in found]


def _module(name: str) -> Page:
    loaded = importlib.import_module(name)
    for each in loaded.__all__:
        setattr(loaded, each, getattr(loaded, each))  # pdoc does not find names that load at their first use
    module = pdoc.doc.Module(loaded)
    return Page(module, [Section(members=[_with_members(module.members[each]) for each in module.obj.__all__])])


def _package() -> Page:
    for name in mpicomm.__all__:
        getattr(mpicomm, name)  # pdoc does not find names that load at their first use
    module = pdoc.doc.Module(mpicomm)
    methods = {method.qualname: method for method in _members(module.members["Communicator"])}
    others = {cls.__name__: pdoc.doc.Class("mpicomm", cls.__name__, cls, (cls.__module__, "")) for cls in UNEXPORTED}
    everything = {**module.members, **methods, **others}
    named = {name for purpose in PURPOSES for name in purpose.names}
    owners = {name: _owner(Communicator, method.name).__name__ for name, method in methods.items()}
    unplaced = {name: owner for name, owner in owners.items() if name not in named}
    sections = []
    for purpose in PURPOSES:
        names = [*purpose.names, *(name for name, owner in unplaced.items() if owner in purpose.classes)]
        section = Section(purpose.title, purpose.text, [_with_members(everything[name]) for name in names])
        sections.append(section)
        named.update(names)
    missing = sorted({*mpicomm.__all__, *methods} - named - ELSEWHERE)
    if missing:
        raise SystemExit(f"scripts/documents/reference.py has no purpose for {', '.join(missing)}")
    return Page(module, sections)


def _with_members(doc: pdoc.doc.Doc[Any]) -> tuple[pdoc.doc.Doc[Any], list[pdoc.doc.Doc[Any]]]:
    """Return an object with its members. The members of a Communicator are in sections instead."""
    return doc, [] if doc.obj is Communicator else _members(doc)


def _members(doc: pdoc.doc.Doc[Any]) -> list[pdoc.doc.Doc[Any]]:
    """Return the members of a class that mpicomm defines for users; other objects have none."""
    members = doc.members.values() if isinstance(doc, pdoc.doc.Class) else ()
    return [member for member in members if member.qualname not in INTERNAL and _is_own(doc.obj, member.name)]


def _is_own(cls: type, name: str) -> bool:
    """Return whether mpicomm defines a member under a public name; the member "__init__" may be `__new__`, too."""
    names = ("__init__", "__new__") if name == "__init__" else () if name.startswith("_") else (name,)
    return any(_owner(cls, each).__module__.startswith("mpicomm.") for each in names)


def _owner(cls: type, name: str) -> type:
    """Return the class that defines a member; ``cls`` itself for an annotation."""
    return next((base for base in cls.__mro__ if name in vars(base)), cls)
