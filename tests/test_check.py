"""`raydp-parallel check`: passes on two CPU replicas, says what fails, and exits as it says."""

from __future__ import annotations

import re

import pytest

from raydp_parallel import check, command


def test_all_holds(capfd: pytest.CaptureFixture[str]) -> None:
    """Each check is ok, each device is timed, and the last line says so."""
    status = command.main(["check", "--devices", "cpu,cpu"])
    out = capfd.readouterr().out
    assert status == 0, out
    assert re.findall(r"^  ok +(\w+)", out, re.M) == ["compared", "killed"]
    assert len(re.findall(r"^ +replica \d on cpu +\d+\.\d\d$", out, re.M)) == 2
    assert out.splitlines()[-1] == "check passed"


def test_what_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wrong values, and errors of a check."""
    monkeypatch.setattr(check, "distance", lambda *_: 1e-6)
    monkeypatch.setattr(check.Executor, "grow", None)
    monkeypatch.setattr(check, "timed", lambda *_: ())
    assert check.main("cpu,cpu") == 1
    out = capfd.readouterr().out
    assert re.search("FAILED  compared .*differ by .e-06", out), out
    assert re.search("FAILED  TypeError: 'NoneType'", out), out
    assert out.splitlines()[-1] == "check FAILED"


@pytest.mark.parametrize("devices", ["tpu", "-1", ""])
def test_devices_are_checked(devices: str) -> None:
    """A device that is none is an error in one line."""
    assert command.main(["check", f"--devices={devices}"]) == 1
