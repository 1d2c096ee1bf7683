"""`raydp-parallel check`: passes on two CPU replicas, says what fails, and exits as it says."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from raydp_parallel import check, command

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(autouse=True)
def same_random_numbers() -> Iterator[None]:
    """The check seeds generators for itself."""
    with torch.random.fork_rng():
        yield


def test_all_rows_hold(capfd: pytest.CaptureFixture[str]) -> None:
    """Each row is ok, each net is timed, and the last line says so."""
    status = command.main(["check", "--devices", "cpu,cpu", "--quick"])
    out = capfd.readouterr().out
    assert status == 0, out
    assert len(re.findall(r"^  ok", out, re.M)) == 6
    assert len(re.findall(r"is faster$|as fast$", out, re.M)) == 4
    assert out.splitlines()[-1] == "check passed: all 6 rows hold"


def test_a_row_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wrong values, and errors of a row, fail the check and no other row."""

    def wrong(self: check.ChunkByChunk, x: Tensor) -> Tensor:
        return right(self, x) * (1 + 1e-6)

    def broken(here: check.Here) -> check.Row:
        raise RuntimeError("nobody to kill")

    right = check.ChunkByChunk.__call__
    monkeypatch.setattr(check.ChunkByChunk, "__call__", wrong)
    monkeypatch.setattr(check, "killed", broken)
    monkeypatch.setattr(check, "timed", lambda here: {})
    assert check.main(["--devices", "cpu,cpu", "--quick"]) == 1
    out = capfd.readouterr().out
    assert "values differ by 1e-06" in out
    assert "RuntimeError: nobody to kill" in out
    assert "check FAILED: 6 of 6 rows" in out


@pytest.mark.parametrize("devices", ["tpu", "-1", ""])
def test_devices_are_checked(devices: str) -> None:
    """A device that is none is a wrong argument."""
    with pytest.raises(SystemExit):
        check.main(["--devices", devices])
