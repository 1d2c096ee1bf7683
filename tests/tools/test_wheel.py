"""The sdist and the wheel: installed apart from the checkout, and used."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
import ray
from harness import ROOT, printed

pytestmark = pytest.mark.long

PROGRAM = """
import torch
import raydp_parallel
from raydp_parallel import DataParallel

model = DataParallel(torch.nn.Linear(3, 1), ["cpu", "cpu"])
model(torch.ones(4, 3)).sum().backward()
where = {info.pid for info in model.executor.replicas()}
print(raydp_parallel.__file__, len(where), model.module.bias.grad.item())
"""


LEFT_OUT = (
    *(".git", ".venv*", "__pycache__", "*.egg-info", "*.pyc", "build", "dist", "site"),
    *(".coverage*", ".hypothesis", ".*_cache"),
)
"""What a checkout has besides its files."""

MAKE_SDIST = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the checkout, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    printed("-c", MAKE_SDIST, str(folder), cwd=source, PYTHONPATH="")
    shutil.rmtree(source / "raydp_parallel.egg-info")
    (made,) = folder.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        archive.extractall(folder, filter="data")
    return folder / made.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    printed("-m", "pip", *build, str(sdist), cwd=folder, PYTHONPATH="")
    (made,) = folder.glob("*.whl")
    return made


def files(folder: Path) -> set[str]:
    """All files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_is_the_checkout_and_runs_its_tests(sdist: Path) -> None:
    """So it can be tested where it is unpacked: all are found there, and some are run."""
    made = {name for name in files(sdist) if ".egg-info/" not in name}
    assert made == files(sdist.parent / "source") | {"PKG-INFO", "setup.cfg"}
    here = {"PYTHONPATH": str(sdist), "PYTHONDONTWRITEBYTECODE": "1"}
    pytest_ = "-m", "pytest", "-q", "-p", "no:cacheprovider"
    found = printed(*pytest_, "--collect-only", "--long", cwd=sdist, **here)
    assert re.search(r"[1-9]\d{3,}(?:/\d+)? tests collected", found)
    batch = "tests/test_batch.py", "-k", "gather"
    assert " passed" in printed(*pytest_, *batch, cwd=sdist, **here)


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.stat().st_size < 300_000
    names = zipfile.ZipFile(wheel).namelist()
    kept = {f"raydp_parallel/{name}" for name in files(ROOT / "raydp_parallel")}
    kept = {name for name in kept if name.endswith((".py", ".json", ".html", ".typed"))}
    assert {name for name in names if ".dist-info/" not in name} == kept
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.ray
def test_it_runs_where_the_checkout_is_not(wheel: Path, tmp_path: Path) -> None:
    """Driver and replicas use what was installed, and so does the command."""
    site = tmp_path / "site"
    install = ["install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    printed("-m", "pip", *install, cwd=tmp_path, PYTHONPATH="")
    there = {"PYTHONPATH": str(site), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    said = printed("-c", PROGRAM, cwd=tmp_path, **there)
    assert f"{site}/raydp_parallel/__init__.py 2 4.0" in said
    command = str(site / "bin" / "raydp-parallel")
    assert json.loads(printed(command, "grafana", cwd=tmp_path, **there))["panels"]
