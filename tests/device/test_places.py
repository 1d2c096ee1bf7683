"""Tests on stand-in GPUs: one file of the contract in each run, and with ``--long`` the contract,
features and the device's own in all places: module on the CPU, on the first GPU, on another one.
"""

from __future__ import annotations

import os
import shutil
from itertools import product

import on_gpus
import pytest
from harness import printed

if on_gpus.asked() != "cpu":
    pytest.skip("these are on GPUs", allow_module_level=True)

LONG = ["tests/contract", "tests/features"], ["tests/device", "--long"]
ALONE = ["tests/contract/test_module_db.py", "--long", "-k", "on_the_stand_in"]


@pytest.mark.parametrize(
    ("place", "tests"),
    [
        ("cuda", ["tests/contract/test_contract_batch.py"]),
        *[
            pytest.param(*both, marks=pytest.mark.long)
            for both in (*product(on_gpus.PLACES[1:], LONG), ("cuda:0", ALONE))
        ],
    ],
)
@pytest.mark.timeout(900)
def test_tests_pass_on_gpus(place: str, tests: list[str]) -> None:
    """In a process of their own."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("NO C++ COMPILER: NOTHING THAT NEEDS A GPU WAS TESTED")
    if place != "cuda:0":  # they take longest, and choose of all that the others test
        tests = [*tests, "--ignore", "tests/contract/test_sequences.py"]
    printed("-m", "pytest", "-q", "--device", place, *tests)
