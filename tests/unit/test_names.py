"""Names of the package: a class has a name that no other class has, so that readers and searches find one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import mpicomm

PACKAGE = Path(mpicomm.__file__).parent


def test_no_two_public_classes_have_one_name() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert len(modules) > 300
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}
