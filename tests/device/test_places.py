"""A part of the tests on stand-in GPUs, in each run of the tests; `.ci/run` runs all there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import on_gpus
import pytest

if on_gpus.asked() != "cpu":
    pytest.skip("these are on GPUs", allow_module_level=True)


@pytest.mark.parametrize(
    ("place", "tests"),
    [
        pytest.param("cuda:0", ["tests/device"], marks=pytest.mark.long),
        ("cuda", ["tests/contract/test_contract_batch.py"]),
    ],
)
def test_a_part_of_the_tests_passes_on_gpus(place: str, tests: list[str]) -> None:
    """The device itself, and replicas with a GPU each."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("NO C++ COMPILER: NOTHING THAT NEEDS A GPU WAS TESTED")
    command = [sys.executable, "-m", "pytest", "-q", "--device", place, *tests]
    # Another run's workers are no business of this one.
    env = {name: one for name, one in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
