"""The house: who may import whom, and that every public thing says what it is."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydp_parallel

PACKAGE = Path(raydp_parallel.__file__).parent

FLOORS: tuple[tuple[str, ...], ...] = (
    ("forks",),
    (
        *("context", "dial", "errors", "exchange", "grafana", "links", "monitor", "options", "origins", "phases"),
        *("progress", "pulse"),
    ),
    ("advice", "frames", "messages"),
    ("accounts", "crew", "devices", "engine", "line", "loaded", "outcome", "wire"),
    ("batch", "codec", "reporter", "respawn", "seats", "sources"),
    ("collective", "jobs", "measures", "outgoing", "reduction", "snapshot", "status", "summaries", "trace"),
    ("page", "replay", "replica", "runs"),
    ("actor", "books"),
    ("local", "naming"),
    ("cluster",),
    ("roster", "telemetry"),
    ("dispatch", "groups"),
    ("executor",),
    ("pool", "post"),
    ("bridge",),
    ("calling",),
    ("primitives",),
    ("data_parallel",),
    ("check",),
    ("command",),
    ("__main__",),
)
"""The rooms, from the ground up. A folder is one room. A room imports only from lower floors."""

FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
FILES_WITH_RAY = {"actor.py", "cluster/session.py", "telemetry.py"}
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@functools.cache
def parsed(file: str) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse((PACKAGE / file).read_text())


def room_of(file: str) -> str:
    """The room that a file belongs to."""
    return Path(file).parts[0].removesuffix(".py")


def imported(file: str) -> Iterator[str]:
    """The modules that a file imports, by full name."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_used(file: str) -> set[str]:
    """The rooms of this package that a file imports from."""
    names = (name.split(".") for name in imported(file))
    return {parts[1] for parts in names if parts[0] == "raydp_parallel" and len(parts) > 1}


def test_every_room_has_a_floor() -> None:
    """And every floor's rooms exist."""
    assert {room_of(file) for file in FILES} - {"__init__"} == set(FLOOR_OF)


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_a_room_imports_from_lower_floors(file: str) -> None:
    """Or from its own folder; hence there are no cycles."""
    room = room_of(file)
    for other in rooms_used(file) - {room}:
        assert FLOOR_OF[other] < FLOOR_OF[room], f"{file} (floor {FLOOR_OF[room]}) imports {other} ({FLOOR_OF[other]})"
    assert room not in rooms_used(file) or (PACKAGE / room).is_dir()


def test_files_of_a_folder_do_not_import_each_other_in_circles() -> None:
    """Inside a room there is an order, too."""
    for folder in {Path(file).parent for file in FILES} - {Path()}:
        names = {Path(file).stem for file in FILES if Path(file).parent == folder}
        left = {name: _inner(folder, name) & names - {name} for name in names}
        while free := {name for name, needs in left.items() if not needs & left.keys()}:
            left = {name: needs for name, needs in left.items() if name not in free}
        assert not left, f"{folder}: {left}"


def _inner(folder: Path, name: str) -> set[str]:
    prefix = f"raydp_parallel.{folder}."
    return {
        found.removeprefix(prefix).split(".")[0]
        for found in imported(f"{folder}/{name}.py")
        if found.startswith(prefix)
    }


def test_ray_is_imported_in_few_files() -> None:
    """So most of the package is tested without it."""
    found = {file for file in FILES if any(name.split(".")[0] == "ray" for name in imported(file))}
    assert found == FILES_WITH_RAY


@pytest.mark.parametrize("file", FILES)
def test_imports_stand_at_the_top(file: str) -> None:
    """None inside functions."""
    functions = (n for n in ast.walk(parsed(file)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    inner = [n.lineno for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert not inner, f"{file}: lines {inner}"


def _public(body: list[ast.stmt]) -> Iterator[Any]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return (node for node in body if isinstance(node, kinds) and not node.name.startswith("_"))


@functools.cache
def _documented_methods() -> set[str]:
    classes = (node for file in FILES for node in ast.walk(parsed(file)) if isinstance(node, ast.ClassDef))
    return {node.name for found in classes for node in _public(found.body) if ast.get_docstring(node)}


@pytest.mark.parametrize("file", FILES)
def test_every_public_thing_has_a_docstring(file: str) -> None:
    """Files, functions, classes, and methods but those that another class documents, such as a link's."""
    tree = parsed(file)
    assert ast.get_docstring(tree) or file == "snapshot/__init__.py"
    known = _documented_methods()
    for node in _public(tree.body):
        overload = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
        assert ast.get_docstring(node) or overload, f"{file}: {node.name}"
        for method in _public(node.body) if isinstance(node, ast.ClassDef) else ():
            overrides = method.name in known or method.name in ("persistent_id", "persistent_load", "reducer_override")
            assert ast.get_docstring(method) or overrides, f"{file}: {node.name}.{method.name}"


@pytest.mark.parametrize("file", FILES)
def test_every_field_that_crosses_the_wall_is_documented(file: str) -> None:
    """Named tuples and frozen dataclasses say what each field is."""
    for node in ast.walk(parsed(file)):
        if not isinstance(node, ast.ClassDef) or not _is_record(node) or node.name.startswith("_"):
            continue
        fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        doc = ast.get_docstring(node) or ""
        missing = [name for name in fields if not re.search(rf"^ +{name}(, \w+)*: ", doc, re.MULTILINE)]
        assert not missing, f"{file}: {node.name}: {missing}"


def _is_record(node: ast.ClassDef) -> bool:
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    decorators = (d for d in node.decorator_list if isinstance(d, ast.Call))
    return "NamedTuple" in bases or any(k.arg == "frozen" for d in decorators for k in d.keywords)


def test_the_public_face() -> None:
    """What ``__all__`` names exists, says what it is, and is sorted as a reader would."""
    assert len(set(raydp_parallel.__all__)) == len(raydp_parallel.__all__)
    for name in raydp_parallel.__all__:
        assert inspect.getdoc(getattr(raydp_parallel, name)), name


def examples() -> list[tuple[str, str]]:
    """The code in docstrings: what is indented behind a ``::``."""
    found = []
    for file in FILES:
        for node in ast.walk(parsed(file)):
            doc = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) else None
            for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", f"{doc}\n"):
                found.append((f"{file}: {getattr(node, 'name', '')}", textwrap.dedent(block)))
    return found


def test_there_are_examples() -> None:
    """So that the next test tests something."""
    assert len(examples()) >= 3


@pytest.mark.parametrize(("place", "code"), examples(), ids=[place for place, _ in examples()])
@pytest.mark.usefixtures("cluster")
def test_examples_in_docstrings_run(place: str, code: str) -> None:
    """As they stand, with the names that every reader knows."""
    net = nn.Sequential(nn.Sequential(nn.Linear(5, 2)))
    net.add_module("encoder", nn.Sequential(nn.Linear(2, 2)))
    scope = {
        **{name: getattr(raydp_parallel, name) for name in raydp_parallel.__all__},
        "net": net,
        "model": raydp_parallel.DataParallel(net, ["cpu", "cpu"]),
        "x": torch.randn(6, 5),
        "y": torch.zeros(6, 2),
        "criterion": nn.MSELoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
    }
    exec(code, scope)
