"""Types and style, by the versions of mypy and ruff that `constraints.txt` names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [["mypy"], ["ruff", "check", "."], ["ruff", "format", "--check", "."]],
    ids=["types", "style", "format"],
)
def test_the_sources_pass(command: list[str], tmp_path: Path) -> None:
    """The package, and what tests share, are typed strictly; all files have one style."""
    caches = {"mypy": ["--cache-dir", str(tmp_path)], "ruff": ["--no-cache"]}[command[0]]
    done = subprocess.run(
        [sys.executable, "-m", *command, *caches],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
