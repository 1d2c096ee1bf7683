"""The documents: each row of the contract names tests that exist, and each link leads somewhere."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import raydp_parallel
from raydp_parallel import DataParallel, errors

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("[!.]*/**/README.md")])
CONTRACT = (ROOT / "docs" / "contract.md").read_text()
COUNTS = {"C": 17, "F": 9, "S": 14, "K": 4, "R": 21, "A": 11, "G": 13, "B": 15, "X": 3, "T": 7}
ROWS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
ROWS.insert(ROWS.index("T1"), "X7")  # X4 to X6 and X8 are gone
LINES = [line for line in CONTRACT.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]


@functools.cache
def names_in(file: str) -> set[str]:
    """The names of a file's tests."""
    found = next((ROOT / "tests").rglob(file))
    body = ast.parse(found.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_one_line() -> None:
    """In order."""
    assert [line.split()[1] for line in LINES] == ROWS


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[1])
def test_a_row_names_tests_that_exist(line: str) -> None:
    """At least one; a pattern matches some."""
    _, status, tests = line.strip("| ").rsplit(" | ", 2)
    assert status in ("kept", "kept, better", "deviation")
    for part in tests.split("; "):
        file, _, names = part.partition(": ")
        named = re.findall(r"`(test_\w+\*?)`", names)
        assert named, f"{file}: no test"
        for name in named:
            assert fnmatch.filter(names_in(file), name), f"{file}: {name}"


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """Relative ones, to files and to headings."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert re.match(r"\w+:", link) or target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


def test_the_api_page_has_every_public_name() -> None:
    """Each error is one of them; and the wrapper's own methods."""
    page = (ROOT / "docs" / "api.md").read_text()
    found = set(re.findall(r"^::: .*?(\w+)$", page, re.MULTILINE))
    others = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert found >= {*raydp_parallel.__all__} >= others
    for path, name in re.findall(r"^::: ([\w.]+)\.(\w+)$", page, re.MULTILINE):
        text = " ".join(
            (inspect.getdoc(getattr(importlib.import_module(path), name)) or "").split()
        )
        assert re.split(r"(?<=\.) ", text)[0].replace("``", "`") in page, name  # on disk, too
    (members,) = re.findall(r"::: raydp_parallel.DataParallel\n.*\n +members: \[(.*)\]", page)
    own = {name for name in vars(DataParallel) if not hasattr(torch.nn.DataParallel, name)}
    assert set(members.split(", ")) == {n for n in own if n[0] != "_"} | {"forward"}


def prose(document: Path) -> list[str]:
    """The sentences of a document, without code and tables."""
    text = re.sub(r"```.*?```|^\|.*?$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "code", text)
    parts = re.split(r"\n\s*\n|\n(?=\s*[-#>\d])|(?<=[.!?:;])\s+", text)
    return [" ".join(part.split()).lstrip("-#>* ") for part in parts]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(document: Path) -> None:
    """At most 30 words, and none begins with a clause that has to be read twice."""
    for sentence in prose(document):
        assert len(re.findall(r"[\w'-]+", sentence)) <= 30, sentence
        assert not re.match(r"(What|That|Whether)\b(?!.*\?)", sentence), sentence


def test_the_site_has_all_pages() -> None:
    """In the order of a user's questions."""
    pages = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
