"""A public method has a docstring, or it fulfils a method that has one: of a base, or of a Protocol.

The docstring of a class names the Protocol that the class fulfils, as `Name`. So a fact stands in one place.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpicomm

PACKAGE = Path(mpicomm.__file__).parent
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
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert without_docstring(trees) == []


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
    modules: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert len(modules) > 300
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}
