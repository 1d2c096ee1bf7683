"""The documentation as a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def test_it_is_built_without_a_warning(tmp_path: Path) -> None:
    """Every page is in the navigation, every link leads somewhere, and what the package exports is
    in the reference.
    """
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    reference = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    described = set(re.findall(r'id="raydp_parallel\.(?:\w+\.)?(\w+)"', reference))
    exported = __import__("raydp_parallel").__all__
    assert set(exported) <= described
    examples = (tmp_path / "examples" / "index.html").read_text(encoding="utf-8")
    assert all(
        f"examples/{path.name}" in examples
        for path in (ROOT / "examples").glob("*.py")
        if path.stem != "command_line"
    )
