"""The house: what is counted may only become less, and few files import Ray.

``python tests/test_house.py --write`` lowers the numbers of ``budget.json`` to those of today.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import raydp_parallel
from raydp_parallel import Options

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "raydp_parallel"
BUDGET = TESTS / "budget.json"
FILES_WITH_RAY = {"cluster/ray_api.py", "replica/actor.py"}
OF_PYTHON = {"_replace", "_asdict", "_make", "_fields", "_exit", "_getframe"}
QUOTES = "'\""


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """Each file of the package, by its path, with its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def lines(folder: Path) -> int:
    """The lines of all Python files in a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


_LAYOUT = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def lines_of_code(text: str) -> int:
    """The lines of a file that are neither documentation, nor comments, nor imports, nor blank."""
    free: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        documents = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if documents or isinstance(node, (ast.Import, ast.ImportFrom)):
            free.update(range(node.lineno, (node.end_lineno or 0) + 1))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - free)


def imports(tree: ast.Module) -> dict[str, str]:
    """The names that a file imports, or gives to parts of what it imports, with what they are."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
                found.setdefault(alias.name, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            (target, *_) = node.targets if isinstance(node, ast.Assign) else [node.target]
            first, dot, rest = ast.unparse(node.value or target).partition(".")
            if isinstance(target, ast.Name) and first in found and re.fullmatch(r"[\w.]*", rest):
                found[target.id] = found[first] + dot + rest
    return found


def own_names(tree: ast.Module) -> set[str]:
    """The names that a file defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def private_names(tree: ast.Module, own: set[str]) -> set[str]:
    """The private names of others that a file uses: by import, through a dotted name or an alias,
    as a string of ``getattr``, or as an attribute of an object that is not ours.
    """
    known = imports(tree)
    used = set(known.values())
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            name = f"{ast.unparse(node.args[0])}.{ast.unparse(node.args[1]).strip(QUOTES)}"
        first, dot, rest = name.partition(".")
        last = name.rpartition(".")[2]
        if first in known and re.fullmatch(r"[\w.]+", rest):
            used.add(known[first] + dot + rest)
        elif re.match(r"(f')?_[a-zA-Z]", last) and last not in own | OF_PYTHON:
            used.add(f"torch.{last}")  # of an instance
    packages = r"(torch|ray|cloudpickle)(\.\w+)*\.((f')?_[a-zA-Z].*)"
    private = {name for name in used if re.fullmatch(packages, name)}
    return {name for name in private if not any(n.startswith(f"{name}.") for n in private)}


def largest_message() -> int:
    """The most fields that a class of ``wire/messages.py`` has."""
    tree = ast.parse((PACKAGE / "wire" / "messages.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return max(sum(isinstance(part, ast.AnnAssign) for part in one.body) for one in classes)


def largest_type() -> int:
    """The most attributes of a class. What users read as a record may be as long as it is."""
    read = {"DataParallel", "ExecutorStats"}
    types = [node for _, tree in parsed() for node in ast.walk(tree)]
    return max(
        len(attributes(one))
        for one in types
        if isinstance(one, ast.ClassDef) and one.name not in read
    )


def attributes(type_: ast.ClassDef) -> set[str]:
    """The names that a class declares, or sets in itself."""
    found = {ast.unparse(part.target) for part in type_.body if isinstance(part, ast.AnnAssign)}
    for node in ast.walk(type_):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


@functools.cache
def measured() -> dict[str, int]:
    """The numbers of today."""
    trees = [tree for _, tree in parsed()]
    own = set().union(*map(own_names, trees))
    return {
        "lines of code of the package": sum(
            lines_of_code(path.read_text()) for path in PACKAGE.rglob("*.py")
        ),
        "lines of the tests": lines(TESTS),
        "options": len(fields(Options)),
        "public names": len(raydp_parallel.__all__),
        "private names of torch and Ray": len(
            set().union(*(private_names(tree, own) for tree in trees))
        ),
        "fields of the largest message": largest_message(),
        "attributes of the largest type": largest_type(),
        "uses of Any": sum(
            len(re.findall(r"\bAny\b", ast.unparse(tree))) - ("Any" in imports(tree))
            for tree in trees
        ),
    }


@pytest.mark.parametrize("what", json.loads(BUDGET.read_text()))
def test_nothing_grows(what: str) -> None:
    """Whoever needs more pays with something else."""
    allowed = json.loads(BUDGET.read_text())[what]
    assert measured()[what] <= allowed, f"{what}: {measured()[what]}, at most {allowed}"


def test_all_is_counted() -> None:
    """The file has each number, and no other."""
    assert json.loads(BUDGET.read_text()).keys() == measured().keys()


def test_ray_is_imported_in_few_files() -> None:
    """So that most of the package runs without it."""
    found = {
        file
        for file, tree in parsed()
        if any(name.partition(".")[0] == "ray" for name in imports(tree).values())
    }
    assert found <= FILES_WITH_RAY


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """Never with a clause that has to be read twice."""
    for file, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                found = re.search(r"(?:^|[.:] )(What|That|Whether)\b", text, re.MULTILINE)
                assert not found and not re.match("(Those|Which)\\b", text), f"{file}: {text}"


def test_the_public_face_is_documented() -> None:
    """All that ``__all__`` names exists, once, and says what it is."""
    assert len(set(raydp_parallel.__all__)) == len(raydp_parallel.__all__)
    for name in raydp_parallel.__all__:
        assert inspect.getdoc(getattr(raydp_parallel, name)), name


def test_the_steps_of_the_journey_stand_in_the_code() -> None:
    """Those of both pictures, under the same names, each once."""
    named = r"\[(\d+)\] +(one trip|\w+)"
    pages = PACKAGE / "wrapper.py", TESTS.parent / "docs" / "architecture.md"
    pictures = [re.findall(named, page.read_text().split("```")[1]) for page in pages]
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    steps = sorted(re.findall(f"# {named}$", code, re.MULTILINE), key=lambda step: int(step[0]))
    assert [int(number) for number, _ in steps] == [*range(1, 13)]
    assert all(sorted(picture) == sorted(steps) for picture in pictures)


def test_all_that_pages_of_the_code_name_exists() -> None:
    """Each name in code font is a file, a folder, an option or a word of the package."""
    page = (TESTS.parent / "docs" / "architecture.md").read_text()
    rest = (TESTS.parent / "CONTRIBUTING.md").read_text().partition("## Where to change")[2]
    page += rest.partition("## Rules")[0]
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
        words = re.findall(r"[A-Za-z_]\w+", name)
        path = re.fullmatch(r"[\w/]+(\.py|/)", name)
        assert (PACKAGE / name).exists() if path else all(word in code for word in words), name


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    before = json.loads(BUDGET.read_text())
    now = {what: min(number, before.get(what, number)) for what, number in measured().items()}
    BUDGET.write_text(json.dumps(now, indent=2) + "\n")
