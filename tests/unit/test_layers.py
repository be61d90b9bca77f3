"""Each room of the package imports only from rooms below it, no two modules import each other, and names are public.

A public method has a docstring, or it fulfils a method that has one: of a base, or of a Protocol. The docstring of a
class names the Protocol that the class fulfils, as `Name`. So a fact stands in one place.
"""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import mpicomm
from tests.helpers.jobs.mpiexec import run_command

ROOT = Path(mpicomm.__file__).parents[1]

# The rooms, lowest first: a room imports from the rows above its own. A module that is named here is a separate room.
ROOMS = [
    {"errors", "sizes"},
    {"environment", "waiting"},
    {"log", "expressions"},
    {"kernels"},
    {"devices"},
    {"devices.cuda", "activity"},
    {"mpi"},
    {"epilogues"},
    {"cluster"},
    {"recording"},
    {"sharing"},
    {"session"},
    {"symmetric"},
    {"collectives"},
    {"collectives.host", "collectives.gpu.algorithms"},
    {"collectives.gpu"},
    {"domains"},
    {"dispatch", "messages", "windows", "observation"},
    {"products"},
    {"api"},
    {"experts"},
    {"world", "torch"},
    {"cli"},
    {"info", "doctor", "bench", "trace", "__main__"},
    {"ring", "p2p", "tune"},
]
ROOM = {name: number for number, names in enumerate(ROOMS) for name in names}

MPI_USERS = {
    *("mpi", "cluster", "recording", "session", "dispatch", "messages", "windows", "products", "observation", "api"),
    *("experts", "world", "torch", "__main__", "cli", "bench", "doctor", "p2p"),
    *(name for name in ROOM if name.startswith(("collectives", "domains"))),
}
CUDA_USERS = ("devices/cuda/", "collectives/gpu/", "bench/", "p2p/")
# They are used as any user of the package would be.
COMMAND_LINES = {"__main__", "cli", "ring", "info", "doctor", "bench", "p2p", "trace", "tune"}

NEVER = [
    ("mpi/", "mpicomm.kernels.packing"),
    *(("torch/", f"mpicomm.{name}") for name in ("collectives.gpu", "collectives.host", "session", "dispatch")),
]
"""Rooms that import nothing of a module below them."""
INTERNALS = {"torch/": "_internals"}
"""The only private attribute of Communicators that a room uses."""
PRIVATE = {name for name in (*dir(mpicomm.Communicator), "_session") if re.match("_[a-z]", name)}


@cache
def modules() -> dict[str, ast.Module]:
    paths = {path: path.relative_to(ROOT / "mpicomm").as_posix() for path in sorted((ROOT / "mpicomm").rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for path, name in paths.items() if name != "__init__.py"}


def imports(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports, also in functions and only for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            # A name that is imported from a package may be a module of it.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(names: list[str]) -> str | None:
    """The room of a module of the package, by its dotted name in parts: the longest that is in the table."""
    parts = (".".join(names[:length]) for length in range(len(names), 0, -1))
    return next((name for name in parts if name in ROOM), None)


def check(module: str, tree: ast.Module) -> None:
    own = room_of(module.removesuffix(".py").split("/"))
    assert own is not None, f"{module} is in no room"
    for name in imports(tree):
        assert not any(module.startswith(room) and name.startswith(never) for room, never in NEVER)
        top, *rest = name.split(".")
        imported = room_of(rest)
        if top == "mpicomm" and imported is not None:
            assert ROOM[imported] < ROOM[own] or imported == own, f"{module} imports {name}"
        elif top == "mpicomm":
            assert own in COMMAND_LINES, f"{module} imports {name}"
        elif top == "mpi4py":
            assert own in MPI_USERS, f"{module} imports {name}"
        elif top in {"cupy", "cuda"}:
            assert module.startswith(CUDA_USERS), f"{module} imports {name}"
    allowed = [name for room, name in INTERNALS.items() if module.startswith(room)]
    for node in ast.walk(tree) if allowed else ():
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE and ast.unparse(node.value) != "self":
            assert node.attr in allowed, f"{module} uses {ast.unparse(node)}"


def test_modules_import_from_rooms_below_their_own() -> None:
    for module, tree in modules().items():
        check(module, tree)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors.py", "from mpicomm.devices.handle import Kind"),
        ("devices/handle.py", "from mpicomm.sharing import fd_exchange"),
        ("kernels/team.py", "import mpicomm.devices.base"),
        ("kernels/variant.py", "from mpicomm.devices.cuda import memory"),
        ("devices/base.py", "from mpicomm.devices.cuda import memory"),
        ("mpi/regions.py", "from mpicomm.kernels.packing import ENTRY_NBYTES"),
        ("messages/calls.py", "from mpicomm.dispatch.dispatcher import Dispatcher"),
        ("observation.py", "from mpicomm.dispatch import engines"),
        ("torch/streams.py", "from mpicomm.collectives.gpu.plan_cache import PlanCache"),
        ("torch/streams.py", "self.comm._session.backend"),
        ("torch/collectives.py", "engines = comm._collectives.engines"),
        ("symmetric/array.py", "def f():\n    from mpicomm.api.communicator import Communicator"),
        ("symmetric/array.py", "if TYPE_CHECKING:\n    from mpicomm.windows.window import Window"),
        ("collectives/gpu/algorithms/chain/plan.py", "from mpicomm.collectives.gpu.engine import DeviceEngine"),
        ("session/session.py", "import mpicomm"),
        ("symmetric/array.py", "from mpi4py import MPI"),
        ("devices/host.py", "import cupy"),
        ("ring.py", "try:\n    from cuda.bindings import driver\nexcept ImportError:\n    pass"),
        ("devices/handle.py", "from .errors import HandleError"),
        ("unheard_of.py", ""),
    ],
)
def test_import_from_elsewhere_is_found(module: str, source: str) -> None:
    with pytest.raises(AssertionError):
        check(module, ast.parse(source))


def test_no_modules_import_each_other() -> None:
    """Only for type checkers may a class name the subclasses that it makes."""
    names = {module.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for module in modules()}
    graph: dict[str, set[str]] = {}
    for module, tree in modules().items():
        own = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        body = [x for x in tree.body if not (isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING")]
        imported = imports(ast.Module(body, []))
        found = [name.removeprefix("mpicomm.") for name in imported if name.startswith("mpicomm.")]
        graph[own] = {known for name in found for known in (name, name.rpartition(".")[0]) if known in names} - {own}
    # It raises CycleError with the modules of a circle.
    assert set(graphlib.TopologicalSorter(graph).static_order()) == names


def test_the_document_of_rooms_has_this_order() -> None:
    docs = ROOT / "mpicomm/docs"
    table = (docs / "architecture.md").read_text().split("| room |")[1].split("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]
    drawn = [name for name in re.findall(r">([\w.]+)</text>", (docs / "rooms.svg").read_text()) if name in ROOM]
    for names in (named, drawn):
        assert sorted(names) == sorted(ROOM)
        assert names == sorted(names, key=lambda name: -ROOM[name]), "a room stands above one that may import it"


def test_import_loads_nothing_heavy() -> None:
    # A .pth file of another package may import modules at every start: those are not mpicomm's.
    code = "import json, sys; old = {*sys.modules}; import mpicomm; print(json.dumps([*({*sys.modules} - old)]))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = {*json.loads(result.stdout)}
    loaded = {name.split(".")[0] for name in modules}
    assert "mpicomm" in loaded
    assert not loaded & {"cupy", "cuda", "torch", "rich", "matplotlib", "multiprocessing", "asyncio"}
    # Few programs use them, so they load at their first use.
    rooms = ("experts", "windows", "messages", "domains", "recording", "observation", "world")
    few = {*rooms, "products.choose", "products.operands", "expressions.expression", "epilogues.norm"}
    assert not modules & {f"mpicomm.{name}" for name in few}


def test_methods_are_compiled_when_they_are_looked_up() -> None:
    code = "import linecache, mpicomm; mpicomm.Communicator.Bcast; print(*(n for n in linecache.cache if n[0] == '<'))"
    assert run_command(sys.executable, "-c", code).stdout == "<mpicomm Bcast>\n"


def test_all_has_every_public_name() -> None:
    values = {name: getattr(mpicomm, name) for name in {*vars(mpicomm), *dir(mpicomm)}}
    own = {name for name, value in values.items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert {*mpicomm.__all__} == own | {"epilogues", "__version__"}
    assert {name for name in dir(mpicomm) if name[0] != "_"} == {*mpicomm.__all__} - {"__version__"}


def test_no_module_has_the_name_of_a_public_function() -> None:
    # The import of a module binds its name in the package, over the function.
    names = {module.partition("/")[0].removesuffix(".py") for module in modules()}
    assert names & {*mpicomm.__all__} == {"epilogues"}


def test_documents_and_examples_use_public_names() -> None:
    files = [*ROOT.glob("*.md"), *ROOT.glob("mpicomm/**/*.md"), *ROOT.glob("examples/*.*")]
    used = {name for file in files for name in re.findall(r"\bmpicomm\.([A-Z]\w+)", file.read_text())}
    assert "Communicator" in used
    assert used <= {*mpicomm.__all__}


NAME = re.compile(r"`(\w+)`")


def classes_of(tree: ast.Module) -> Iterator[ast.ClassDef]:
    yield from (node for node in tree.body if isinstance(node, ast.ClassDef))


def methods_of(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    # The first of several functions of one name is the getter of a property.
    return {node.name: node for node in reversed(cls.body) if isinstance(node, ast.FunctionDef)}


def above(cls: ast.ClassDef, known: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yield the bases of a class and the classes that its docstring names, and those above them."""
    seen, waiting = {cls.name}, [cls]
    while waiting:
        each = waiting.pop()
        bases = [node.id for base in each.bases for node in ast.walk(base) if isinstance(node, ast.Name)]
        for name in [*bases, *NAME.findall(ast.get_docstring(each) or "")]:
            if name in known and name not in seen:
                seen.add(name)
                waiting.append(known[name])
                yield known[name]


def without_docstring(trees: dict[str, ast.Module]) -> list[str]:
    """Return the public methods of public classes without a docstring, as `file: Class.method`."""
    known = {cls.name: cls for tree in trees.values() for cls in classes_of(tree)}
    return [
        f"{path}: {cls.name}.{name}"
        for path, tree in trees.items()
        for cls in classes_of(tree)
        for name, method in methods_of(cls).items()
        if not name.startswith("_") and not cls.name.startswith("_") and ast.get_docstring(method) is None
        if not any(ast.get_docstring(methods_of(one)[name]) for one in above(cls, known) if name in methods_of(one))
    ]


def test_each_public_method_has_a_docstring_or_fulfils_one() -> None:
    assert without_docstring(modules()) == []


@pytest.mark.parametrize(
    ("doc", "base", "found"),
    [
        ("Swims as a `Fish`.", "", []),
        ("Swims.", "(Fish)", []),
        ("Swims.", "", ["a.py: Pike.swim"]),
        ("Swims as a `Bird`.", "", ["a.py: Pike.swim"]),
    ],
)
def test_a_method_that_fulfils_nothing_needs_a_docstring(doc: str, base: str, found: list[str]) -> None:
    fish = 'class Fish:\n    """Swims."""\n    def swim(self) -> None:\n        """Swim on."""\n'
    bird = 'class Bird:\n    """Flies."""\n    def fly(self) -> None:\n        """Fly."""\n'
    pike = f'class Pike{base}:\n    """{doc}"""\n    def swim(self) -> None:\n        return None\n'
    assert without_docstring({"a.py": ast.parse(fish + bird + pike)}) == found


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
