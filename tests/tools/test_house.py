"""The house: what may import what, and that every public thing says what it is."""

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
from mutable_globals import mutable_globals
from torch import nn

import raydp_parallel

PACKAGE = Path(raydp_parallel.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("devices",),
    ("transport",),
    ("batch", "monitoring", "state"),
    ("replica",),
    ("cluster",),
    ("calls",),
    ("functional",),
    ("data_parallel",),
    ("check",),
    ("command",),
    ("__main__",),
)
"""The packages and the files of the root, from the ground up. Each imports from lower
layers only.
"""

LEAVES = {"errors", "options", "progress"}
"""Files of the root that import nothing of this package, and that all may import."""

LAYER_OF = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}
FILES_WITH_RAY = {"replica/actor.py", "cluster/ray_api.py", "cluster/registry.py"}
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@functools.cache
def parsed(file: str) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse((PACKAGE / file).read_text())


@functools.cache
def nodes(file: str) -> tuple[ast.AST, ...]:
    """All that a file's syntax tree has."""
    return tuple(ast.walk(parsed(file)))


def unit_of(file: str) -> str:
    """The package, or the file of the root, that a file belongs to."""
    return Path(file).parts[0].removesuffix(".py")


def imported(file: str) -> Iterator[str]:
    """The modules that a file imports, by full name."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def units_used(file: str) -> set[str]:
    """What a file imports of this package."""
    names = (name.split(".") for name in imported(file))
    return {parts[1] for parts in names if parts[0] == "raydp_parallel" and len(parts) > 1}


def test_every_unit_has_a_layer() -> None:
    """And every layer's units exist."""
    assert {unit_of(file) for file in FILES} - {"__init__"} == set(LAYER_OF) | LEAVES


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_imports_go_down(file: str) -> None:
    """To lower layers, or within the package."""
    unit = unit_of(file)
    for other in units_used(file) - {unit} - LEAVES:
        assert unit not in LEAVES and LAYER_OF[other] < LAYER_OF[unit], f"{file} imports {other}"
    assert unit not in units_used(file) or (PACKAGE / unit).is_dir()


def test_files_do_not_import_each_other_in_circles() -> None:
    """Inside a package there is an order, too, among its files and folders."""
    for folder in {Path(file).parent for file in FILES} - {Path()}:
        files = [file for file in FILES if folder in Path(file).parents]
        left: dict[str, set[str]] = {}
        for file in files:
            name = Path(file).relative_to(folder).parts[0].removesuffix(".py")
            left.setdefault(name, set()).update(_inner(folder, file) - {name})
        names = set(left) - {"__init__"}
        left = {name: needs & names for name, needs in left.items() if name in names}
        while free := {name for name, needs in left.items() if not needs & left.keys()}:
            left = {name: needs for name, needs in left.items() if name not in free}
        assert not left, f"{folder}: {left}"


def _inner(folder: Path, file: str) -> set[str]:
    prefix = ".".join(["raydp_parallel", *folder.parts, ""])
    found = imported(file)
    return {name.removeprefix(prefix).split(".")[0] for name in found if name.startswith(prefix)}


def test_the_steps_of_the_journey_stand_in_the_code() -> None:
    """Those of the picture in `data_parallel`, each once."""
    comments = [
        number
        for file in FILES
        for number in re.findall(r"# \[(\d+)\]$", (PACKAGE / file).read_text(), re.MULTILINE)
    ]
    assert sorted(map(int, comments)) == list(range(1, 13))


def test_a_class_name_occurs_once() -> None:
    """So that it says which one is meant."""
    found: dict[str, list[str]] = {}
    for file in FILES:
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(file)
    assert not {name: files for name, files in found.items() if len(files) > 1}


def test_a_file_name_occurs_once() -> None:
    """But for those that Python asks for; a check may have the name of what it checks."""
    found: dict[str, list[str]] = {}
    for file in FILES:
        if Path(file).name not in ("__init__.py", "__main__.py") and unit_of(file) != "check":
            found.setdefault(Path(file).name, []).append(file)
    assert not {name: files for name, files in found.items() if len(files) > 1}


def test_ray_is_imported_in_few_files() -> None:
    """So most of the package is tested without it."""
    found = {file for file in FILES if any(name.split(".")[0] == "ray" for name in imported(file))}
    assert found == FILES_WITH_RAY


_OTHERS = ("torch", "nn", "F", "Tensor", "ray", "worker", "cloudpickle")


def private_names(file: str) -> set[str]:
    """The private names of torch, Ray and cloudpickle that a file uses."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            found.add(f"{ast.unparse(node.value)}.{node.attr}")
    return {
        name
        for name in found
        if name.split(".")[0] in _OTHERS
        and any(re.match("_[^_]", part) for part in name.split("."))
    }


def test_private_names_of_others_are_listed() -> None:
    """With what is done without them; and no name is listed that is used no more."""
    text = (PACKAGE.parent / "docs" / "private_names.md").read_text()
    listed = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    assert listed == set().union(*map(private_names, FILES))


_MUTABLE_GLOBALS = {
    "batch/containers.py: registered": "what `register_batch_type` was told",
    "calls/executor.py: _shared": "the executors of wrappers that name none",
    "calls/held_gradients.py: _making_remote": "a lock: models of several threads may share a leaf",
    "calls/training_record.py: trainings": "optimizers that run in replicas",
    "cluster/joining.py: _started_here": "whether Ray was started for this program",
    "cluster/replica_slots.py: _freed": "graphs that torch released, until the next call says so",
    "cluster/respawn.py: _respawners": "threads to end before Ray does",
    "devices/cuda.py: _registry": "whether CUDA has refused to register memory",
    "devices/cuda.py: lent": "memory that a device still copies from",
    "devices/forks.py: _after_fork": "what is notified in a forked child",
    "devices/memory.py: _recycled": "a cache: memory for outputs, used again",
    "devices/process.py: _counters": "numbers that name things, each once",
    "devices/process.py: _of_replica": "whether the process is a replica's",
    "monitoring/reporter.py: _running": "threads to end with the program",
    "replica/exceptions.py: _registry": "Python's record of warnings that were shown",
    "replica/sync_batch_norm.py: _current": "what the running chunk exchanges, in any thread",
    "state/structure.py: _record": "classes, which belong to the process, as they were first seen",
    "state/module_sources.py: _GUARD": "what the driver told a replica's process of modules",
    "state/module_sources.py: _known": "a cache: the texts of loaded modules",
    "state/versions.py: _collectors": "what replaces attributes of torch's class",
    "transport/cuda_ipc.py: _told": "whether a refusal was logged",
    "transport/links/shared.py: _exposures": "storages that were moved to shared memory",
}


def test_mutable_globals_are_few() -> None:
    """Each is listed with its reason; 36 stood here once."""
    assert mutable_globals().keys() == _MUTABLE_GLOBALS.keys()


def _attributes(node: ast.ClassDef) -> set[str]:
    return {
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute)
        and isinstance(found.ctx, ast.Store)
        and isinstance(found.value, ast.Name)
        and found.value.id == "self"
    }


def test_a_class_has_at_most_twelve_attributes() -> None:
    """More are several things, which a reader has to keep in mind at once."""
    classes = (node for file in FILES for node in parsed(file).body)
    large = {n.name for n in classes if isinstance(n, ast.ClassDef) and len(_attributes(n)) > 12}
    assert not large


@pytest.mark.parametrize("file", FILES)
def test_a_call_has_at_most_five_positional_arguments(file: str) -> None:
    """More have names; C's functions have none to give, nor has what only takes names."""
    nameless = re.compile(r"_libc\..*|attrgetter")
    calls = (node for node in nodes(file) if isinstance(node, ast.Call))
    many = [
        call.lineno
        for call in calls
        if len([given for given in call.args if not isinstance(given, ast.Starred)]) > 5
        and not nameless.fullmatch(ast.unparse(call.func))
    ]
    assert not many, f"{file}: lines {many}"


def test_the_glossary_is_short() -> None:
    """At most 25 words of our own."""
    text = (PACKAGE.parent / "docs" / "glossary.md").read_text()
    assert 1 <= len(re.findall(r"^\| [a-z]", text, re.MULTILINE)) - 1 <= 25


@pytest.mark.parametrize("file", FILES)
def test_imports_stand_at_the_top(file: str) -> None:
    """None inside functions."""
    functions = (n for n in nodes(file) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    inner = [
        n.lineno
        for f in functions
        for n in ast.walk(f)
        if isinstance(n, (ast.Import, ast.ImportFrom))
    ]
    assert not inner, f"{file}: lines {inner}"


def _public(body: list[ast.stmt]) -> Iterator[Any]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return (node for node in body if isinstance(node, kinds) and not node.name.startswith("_"))


@functools.cache
def _documented_methods() -> set[str]:
    classes = (node for file in FILES for node in nodes(file) if isinstance(node, ast.ClassDef))
    return {
        node.name for found in classes for node in _public(found.body) if ast.get_docstring(node)
    }


@pytest.mark.parametrize("file", FILES)
def test_every_public_thing_has_a_docstring(file: str) -> None:
    """Files, functions, classes, and methods but those that another class documents, such as a
    link's.
    """
    tree = parsed(file)
    assert ast.get_docstring(tree)
    known = _documented_methods()
    for node in _public(tree.body):
        overload = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
        assert ast.get_docstring(node) or overload, f"{file}: {node.name}"
        for method in _public(node.body) if isinstance(node, ast.ClassDef) else ():
            overrides = method.name in known or method.name in (
                "persistent_id",
                "persistent_load",
                "reducer_override",
            )
            assert ast.get_docstring(method) or overrides, f"{file}: {node.name}.{method.name}"


@pytest.mark.parametrize("file", FILES)
def test_every_field_that_crosses_the_wall_is_documented(file: str) -> None:
    """Named tuples and frozen dataclasses say what each field is."""
    for node in nodes(file):
        if not isinstance(node, ast.ClassDef) or not _is_record(node) or node.name.startswith("_"):
            continue
        fields = [
            n.target.id
            for n in node.body
            if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        ]
        doc = ast.get_docstring(node) or ""
        missing = [
            name for name in fields if not re.search(rf"^ +{name}(, \w+)*: ", doc, re.MULTILINE)
        ]
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
        for node in nodes(file):
            doc = (
                ast.get_docstring(node)
                if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module))
                else None
            )
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
        "torch": torch,
        "net": net,
        "model": raydp_parallel.DataParallel(net, ["cpu", "cpu"]),
        "x": torch.randn(6, 5),
        "y": torch.zeros(6, 2),
        "criterion": nn.MSELoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
    }
    exec(code, scope)
