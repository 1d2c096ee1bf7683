"""Tests on stand-in GPUs: one file of the contract in each run, and with ``--long`` the contract,
features and the device's own in all places: module on the CPU, on the first GPU, on another one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import product

import on_gpus
import pytest

if on_gpus.asked() != "cpu":
    pytest.skip("these are on GPUs", allow_module_level=True)

LONG = ["tests/contract", "tests/features"], ["tests/device", "--long"]


@pytest.mark.parametrize(
    ("place", "tests"),
    [
        ("cuda", ["tests/contract/test_contract_batch.py"]),
        *[pytest.param(*p, marks=pytest.mark.long) for p in product(on_gpus.PLACES[1:], LONG)],
    ],
)
@pytest.mark.timeout(900)
def test_tests_pass_on_gpus(place: str, tests: list[str]) -> None:
    """In a process of their own."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("NO C++ COMPILER: NOTHING THAT NEEDS A GPU WAS TESTED")
    command = [sys.executable, "-m", "pytest", "-q", "--device", place, *tests]
    if place != "cuda:0":  # they take longest, and choose of all that the others test
        command += ["--ignore", "tests/contract/test_sequences.py"]
    # Another run's workers are no business of this one.
    env = {name: one for name, one in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
