"""The table of tested versions says what was run, and nothing else claims more."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import tested_versions

import raydp_parallel

ROOT = Path(__file__).parents[2]
RUNS = json.loads((ROOT / "docs" / "versions.json").read_text(encoding="utf-8"))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

RECORD = """\
begun tests/unit/test_a.py::test_passes
passed tests/unit/test_a.py::test_passes
begun tests/unit/test_a.py::test_fails
failed tests/unit/test_a.py::test_fails
begun tests/contract/test_b.py::test_flaky
failed tests/contract/test_b.py::test_flaky
begun tests/contract/test_b.py::test_flaky
passed tests/contract/test_b.py::test_flaky
begun tests/contract/test_b.py::test_skipped
skipped tests/contract/test_b.py::test_skipped
begun tests/contract/test_b.py::test_hangs
"""


def test_the_page_has_the_table_of_its_data() -> None:
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert tested_versions.page(text, RUNS) == text
    assert all(f"| {run['torch']} | {run['ray']} |" in text for run in RUNS)


def test_the_version_is_the_same_everywhere() -> None:
    """In the metadata, in the package, and at the head of the changelog."""
    (named,) = re.findall(r'^version = "(.*)"$', PROJECT, re.MULTILINE)
    assert raydp_parallel.__version__ == named
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+?),? ", changes, re.MULTILINE)[0] == named


def test_the_classifiers_are_the_pythons_that_were_tested() -> None:
    """With no failure; and no older one may be installed on."""
    found = {tuple(map(int, run["python"].split(".")[:2])) for run in RUNS if not run["failed"]}
    named = re.findall(r'"Programming Language :: Python :: (\d+)\.(\d+)"', PROJECT)
    assert {(int(major), int(minor)) for major, minor in named} == found
    (lowest,) = re.findall(r'requires-python = ">=(\d+)\.(\d+)"', PROJECT)
    assert tuple(map(int, lowest)) == min(found)


@pytest.mark.parametrize("package", ["torch", "ray"])
def test_the_lowest_version_that_installs_is_one_that_was_tested(package: str) -> None:
    """And the pages that name it name the same."""
    (lowest,) = re.findall(rf'"{package}(?:\[default\])?>=([\d.]+)",', PROJECT)
    assert any(re.match(rf"{lowest}\b", run[package]) for run in RUNS if not run["failed"])
    name = {"torch": "torch", "ray": "Ray"}[package]
    for file in ("README.md", "docs/getting-started.md"):
        said = re.findall(rf"{name} (\d+\.\d+)", (ROOT / file).read_text(encoding="utf-8"))
        assert set(said) == {lowest}, file


def test_a_record_is_entered_with_the_versions_that_ran_it(tmp_path: Path) -> None:
    """A test that failed once and passed then has passed; one that did not end has failed; a run
    with the same versions takes the place of the one before.
    """
    for name in ("versions.json", "versions.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path)
    (tmp_path / "record").write_text(RECORD)
    for _ in range(2):
        tested_versions.main(str(tmp_path / "record"), tmp_path)
    runs = json.loads((tmp_path / "versions.json").read_text())
    here = ".".join(map(str, sys.version_info[:2]))
    (run,) = [
        run
        for run in runs
        if run["python"].startswith(f"{here}.") and run["torch"] == version("torch")
        if run["ray"] == version("ray")
    ]
    assert (run["passed"], run["failed"], run["skipped"]) == (2, 2, 1)
    assert run["tests"] == ["contract", "unit"]
    assert "| contract, unit | 2 | 2 |" in (tmp_path / "versions.md").read_text()
