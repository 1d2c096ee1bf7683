"""The wheel: built from the files that are kept, installed apart from the checkout, and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import ray

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch
import raydp_parallel
from raydp_parallel import DataParallel

model = DataParallel(torch.nn.Linear(3, 1), ["cpu", "cpu"])
model(torch.ones(4, 3)).sum().backward()
where = {info.pid for info in model.executor.replicas()}
print(raydp_parallel.__file__, len(where), model.module.bias.grad.item())
"""


def call(command: list[str], folder: Path, **environment: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT / "raydp_parallel",
        source / "raydp_parallel",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    call([sys.executable, "-m", "pip", *build, str(source)], folder)
    (made,) = folder.glob("*.whl")
    return made


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    kept = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "raydp_parallel").rglob("*")
        if path.suffix in {".py", ".json", ".typed"}
    }
    assert {name for name in names if ".dist-info/" not in name} == kept
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.usefixtures("cluster")
def test_it_runs_where_the_checkout_is_not(wheel: Path, tmp_path: Path) -> None:
    """Driver and replicas use what was installed, and so does the command."""
    site = tmp_path / "site"
    install = ["install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    call([sys.executable, "-m", "pip", *install], tmp_path)
    there = {
        "PYTHONPATH": str(site),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }
    printed = call([sys.executable, "-c", PROGRAM], tmp_path, **there)
    assert f"{site}/raydp_parallel/__init__.py 2 4.0" in printed
    command = str(site / "bin" / "raydp-parallel")
    call([command, "grafana", "--out", str(tmp_path / "grafana")], tmp_path, **there)
    assert list((tmp_path / "grafana").rglob("*.json"))
