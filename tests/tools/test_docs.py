"""What the documents say is so: every row of the contract names tests that exist, and every link
leads somewhere.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import pkgutil
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from test_house import FILES, LAYER_OF

ROOT = Path(__file__).parents[2]
NAMES = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")
DOCUMENTS = [
    *[ROOT / f"{name}.md" for name in NAMES],
    *sorted((ROOT / "docs").glob("*.md")),
]
CONTRACT = (ROOT / "docs" / "contract.md").read_text()
COUNTS = {"C": 17, "F": 9, "S": 14, "K": 4, "R": 21, "A": 11, "G": 13, "B": 15, "X": 8, "T": 8}
ROWS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
STATUSES = {"kept", "kept, better", "deviation"}


class Entry(NamedTuple):
    """A line of the contract's tables.

    Attributes:
        row: The row's id.
        status: What became of it.
        tests: For each file the names or patterns of tests.
    """

    row: str
    status: str
    tests: dict[str, list[str]]


def entry(line: str) -> Entry:
    """The entry of a line."""
    row, _, status, tests = (
        line.strip("| ").rsplit(" | ", 3) if line.count(" | ") == 3 else ("", "", "", "")
    )
    assert row, f"not four cells: {line}"
    named = {}
    for part in tests.split("; "):
        file, _, names = part.partition(": ")
        named[file] = re.findall(r"`(test_\w+\*?)`", names)
    return Entry(row, status, named)


ENTRIES = [entry(line) for line in CONTRACT.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]


@functools.cache
def names_in(file: str, short: bool = False) -> set[str]:
    """The names of a file's tests; if asked for, without those that only ``--long`` runs."""
    tree = ast.parse(next((ROOT / "tests").rglob(file)).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if not (short and "pytest.mark.long" in map(ast.unparse, node.decorator_list))
    }


def test_every_row_has_one_entry() -> None:
    """In order."""
    assert [found.row for found in ENTRIES] == ROWS


@pytest.mark.parametrize("found", ENTRIES, ids=lambda found: found.row)
def test_an_entry_names_tests_that_exist(found: Entry) -> None:
    """At least one; a pattern matches some, and a file names some."""
    assert found.status in STATUSES
    assert found.tests
    for file, names in found.tests.items():
        known = names_in(file)
        assert names, f"{file}: no test"
        for name in names:
            assert fnmatch.filter(known, name), f"{file}: {name}"


@pytest.mark.parametrize("found", ENTRIES, ids=lambda found: found.row)
def test_an_entry_has_a_test_that_always_runs(found: Entry) -> None:
    """Without ``--long`` too."""
    assert any(
        fnmatch.filter(names_in(file, short=True), name)
        for file, names in found.tests.items()
        for name in names
    )


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "tests").rglob("test_*.py")))
def test_a_test_that_names_a_row_is_in_its_entry(file: str) -> None:
    """So that the tables are complete."""
    entries = {found.row: found for found in ENTRIES}
    for name in names_in(file):
        for row in re.findall(r"([A-Z]\d+)_", re.match(r"test_((?:[A-Z]\d+_)*)", name)[1]):  # type: ignore[index]
            listed = entries[row].tests.get(file, [])
            assert any(fnmatch.fnmatch(name, pattern) for pattern in listed), f"{row}: {name}"


def test_deviations_have_reasons() -> None:
    """Every row that deviates is in the heading of a reason, and no other is."""
    reasons = CONTRACT.split("## Deviations and their reasons")[1]
    headed = [
        row
        for heading in re.findall(r"\*\*[^*]+\*\*", reasons)
        for row in re.findall(r"\b[A-Z]\d+\b", heading)
    ]
    assert sorted(headed) == sorted(found.row for found in ENTRIES if found.status == "deviation")


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Relative ones, to files and to headings."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_exist(document: Path) -> None:
    """Paths in code marks, such as `tests/oracle.py`; those of the package without its name."""
    for name in re.findall(r"`([\w./]+\.(?:py|md|txt|toml))`", document.read_text()):
        assert any(
            (folder / name).exists() for folder in (ROOT, document.parent, ROOT / "raydp_parallel")
        ), name


PACKAGES = sorted({Path(file).parts[0] for file in FILES if len(Path(file).parts) > 1})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_code_that_exists(document: Path) -> None:
    """Modules in code marks, such as `devices.cuda`, and what is in them."""
    dotted = rf"`(?:raydp_parallel\.)?((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?:\(\))?`"
    for name in re.findall(dotted, document.read_text()):
        if not name.endswith((".py", ".md")):
            assert pkgutil.resolve_name(f"raydp_parallel.{name}") is not None


@pytest.mark.parametrize("package", PACKAGES)
def test_the_readme_of_a_package_names_its_files(package: str) -> None:
    """And no others, in at most 60 lines."""
    text = (ROOT / "raydp_parallel" / package / "README.md").read_text()
    assert len(text.splitlines()) <= 60
    files = {
        str(Path(file).relative_to(package)) for file in FILES if Path(file).parts[0] == package
    }
    named = set(re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE))
    assert named == {file for file in files if not file.endswith("__init__.py")}


def test_the_architecture_names_every_package() -> None:
    """In the table of layers, the lowest last."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"^\| \d \| `(\w+)/`", text, re.MULTILINE)
    assert sorted(named) == [name for name in PACKAGES if name != "check"]
    assert [LAYER_OF[name] for name in named] == sorted(
        [LAYER_OF[name] for name in named], reverse=True
    )
