"""What each module of the package may import; the layers are those of the package, lowest first."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpicomm

ROOT = Path(mpicomm.__file__).parents[1]

# A module imports from the rows above its own alone. The modules of a package, `backend` say, import each other; one
# of them that has a row of its own belongs to that.
LAYERS = [
    {"errors", "descriptor"},
    {"handle", "fd_exchange", "cuda_aware", "waiting", "mappings"},
    {"environment"},
    {"log"},
    {"bootstrap", "backend.cuda_driver"},
    {"kernels"},
    {"backend"},
    {"shared_segments", "placement"},
    {"probe", "signals"},
    {"events", "memory"},
    {"domain"},
    {"collectives"},
    {"collectives.types", "collectives.requests"},
    {"collectives.ops", "collectives.buffers"},
    {"collectives.arguments"},
    {"collectives.calls", "collectives.host_copies"},
    {"collectives.plain_calls", "collectives.known_calls", "collectives.device_preparation"},
    {"collectives.dispatcher"},
    {"guard"},
    {"messages"},
    {"blocking_collectives", "nonblocking_collectives", "persistent_collectives", "point_to_point", "probes"},
    {"communicator"},
    {"command_line"},
    {"report"},
    {"ring", "info", "bench"},
    {"tune"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}

MPI_USERS = {"bootstrap", "cuda_aware", "communicator", "command_line", "bench"} | {
    name for names in LAYERS[LAYERS.index({"collectives"}) + 1 : LAYERS.index({"communicator"})] for name in names
}
CUDA_USERS = ("backend/cuda", "backend/streams.py", "kernels/", "bench/", "collectives/device_")
# They are used as any user of the package would be.
COMMAND_LINES = {"command_line", "report", "ring", "info", "bench", "tune"}

MODULES = sorted(
    path.relative_to(ROOT / "mpicomm").as_posix()
    for path in (ROOT / "mpicomm").rglob("*.py")
    if path != ROOT / "mpicomm/__init__.py"
)


def imports(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports, those of its functions too, those for type checkers alone not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            # What is imported from a package may be a module of it.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (name for other in node.orelse for name in imports(other))
        else:
            yield from imports(node)


def entry(names: list[str]) -> str | None:
    """The entry of the table for a module of the package, by its dotted name in parts."""
    return next((key for key in (".".join(names[:2]), names[0]) if key in LAYER), None) if names else None


def check(module: str, source: str) -> None:
    own = entry(module.removesuffix(".py").split("/"))
    assert own is not None, f"{module} is in no layer"
    for name in imports(ast.parse(source)):
        top, *rest = name.split(".")
        imported = entry(rest)
        if top == "mpicomm" and imported is not None:
            assert LAYER[imported] < LAYER[own] or imported == own, f"{module} imports {name}"
        elif top == "mpicomm":
            assert own in COMMAND_LINES, f"{module} imports {name}"
        elif top == "mpi4py":
            assert own in MPI_USERS, f"{module} imports {name}"
        elif top in {"cupy", "cuda"}:
            assert module.startswith(CUDA_USERS), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_from_lower_layers_only(module: str) -> None:
    check(module, (ROOT / "mpicomm" / module).read_text())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors.py", "from mpicomm.handle import Kind"),
        ("handle.py", "from mpicomm import fd_exchange"),
        ("bootstrap.py", "import mpicomm.backend.base"),
        ("kernels/load.py", "from mpicomm.backend import cuda_memory"),
        ("backend/cuda_driver.py", "from mpicomm.backend import cuda_memory"),
        ("memory.py", "def f():\n    from mpicomm.communicator import Communicator"),
        ("domain.py", "import mpicomm"),
        ("signals.py", "from mpi4py import MPI"),
        ("backend/host.py", "import cupy"),
        ("ring.py", "try:\n    from cuda.bindings import driver\nexcept ImportError:\n    pass"),
        ("handle.py", "from .errors import HandleError"),
        ("unheard_of.py", ""),
    ],
)
def test_import_from_elsewhere_is_found(module: str, source: str) -> None:
    with pytest.raises(AssertionError):
        check(module, source)


def test_import_for_types_alone_is_free() -> None:
    check("memory.py", "if TYPE_CHECKING:\n    from mpicomm.communicator import Communicator")


def test_import_loads_nothing_heavy() -> None:
    # What a .pth file of another package imports at every start is not mpicomm's.
    code = "import json, sys; old = {*sys.modules}; import mpicomm; print(json.dumps([*({*sys.modules} - old)]))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(result.stdout)}
    assert "mpicomm" in loaded
    assert not loaded & {"cupy", "cuda", "torch", "rich", "matplotlib", "multiprocessing", "asyncio"}


def test_public_names() -> None:
    assert set(mpicomm.__all__) == {
        "AVG",
        "BackendUnavailableError",
        "CollectiveTimeoutError",
        "Communicator",
        "HandleError",
        "InvalidUsageError",
        "KernelCompileError",
        "MpicommError",
        "PeerError",
        "SharedEvent",
        "SymmetricArray",
        "__version__",
        "include_dir",
    }
    assert all(hasattr(mpicomm, name) for name in mpicomm.__all__)
