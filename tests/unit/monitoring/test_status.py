"""Running executors as text."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from looking import posted, replica, report

from raydp_parallel import command
from raydp_parallel.cluster import registry
from raydp_parallel.monitoring import html_report, status


def test_one_line_per_replica_and_the_straggler_marked() -> None:
    lines = status.render([posted()]).splitlines()
    assert lines[0].startswith("train  pid 99 on host, job 01000000, models Net-1")
    head, first, second = lines[2:5]
    assert len(head) == len(first) == len(second)
    assert first.split()[:6] == ["0", "cuda:0", "a1b2c3d4", "4711", "ready", "3200"]
    assert second.split()[0] == ">1"
    assert any(line.startswith("! replica 1 on cuda:1") and "straggler" in line for line in lines)
    assert lines[-1].endswith("replica 1 died: SIGKILL")


def test_rates_are_of_the_last_seconds() -> None:
    """Not since the start: a replica that became slow a minute ago shows it."""
    found = posted()
    assert all(300 < rate < 340 for rate in status.rates(found))
    first, second = status.shares(found)
    assert 0.15 < first < 0.25
    assert 0.55 < second < 0.65


def test_nothing_yet() -> None:
    """An executor with replicas that have just started."""
    fresh = report(replica(0, 0.0, calls=0, rows=0, recent_ms=0.0), history=[], events=[])
    assert "0 samples per second" in status.render([posted(fresh)])
    assert "No executor is running" in status.render([])
    assert status.render([posted(fresh._replace(stats=replace(fresh.stats, replicas=())))])


def test_faults_show_once_there_are_some() -> None:
    """Whatever counters of faults there are."""
    assert "deaths" not in status.render([posted()])
    assert "deaths" in status.render([posted(report(replica(0, 0.02, deaths=1), replica(1, 0.02)))])


def test_what_deaths_cost_is_told() -> None:
    found = report(replica(0, 0.02, replays=1), replica(1, 0.02, deaths=1, respawns=1))
    stats = replace(found.stats, replays=1, respawns=1, lost_ms=240.0)
    text = status.render([posted(found._replace(stats=stats))])
    assert "1 chunks run again, 1 replicas replaced, 240 ms lost" in text
    assert {"deaths", "replays", "respawns"} <= set(text.split())


def test_a_driver_that_is_not_heard_of_is_said_to_be() -> None:
    found = posted()
    assert "last heard of 60 s ago" in status.render([found], found["posted"] + 60)


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "often"])
def test_how_often_has_to_be_a_time(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["status", "--watch", "--every", seconds])
    assert f"--every: invalid seconds: '{seconds}'" in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal() -> None:
    """Of names, classes and events, which may be another user's: a title, a colour, a line of its
    own.
    """
    found = posted()
    evil = "\x1b]0;owned\x07\x1b[31m\n\u202e"
    found["stats"]["name"] = found["host"] = found["stats"]["models"][0] = f"x{evil}"
    found["stats"]["replicas"][0]["state"] = evil
    found["events"].append([found["posted"], evil])
    text = status.render([found])
    assert all(character.isprintable() for line in text.split("\n") for character in line)
    assert len(text.splitlines()) == len(status.render([posted()]).splitlines()) + 1
    assert status.table([["a", evil], ["b", ""]])[0].isprintable()


class Store:
    """Ray's key-value store, with entries of another program's."""

    def __init__(self, held: dict[bytes, bytes]) -> None:
        self._held = held
        self.internal_kv_get = lambda key, _namespace: held.get(key)
        self.internal_kv_del = lambda key, _prefix, _namespace: held.pop(key)

    def internal_kv_keys(self, prefix: bytes, _namespace: bytes) -> list[bytes]:
        return [key for key in self._held if key.startswith(prefix)]

    def get_all_job_info(self) -> dict[str, Any]:
        job = SimpleNamespace(job_id=bytes([7]), is_dead=False)
        return {"07": job}


@pytest.mark.parametrize("value", [b"no json", b"[1]", b"[" * 100_000, b"\xff", b"{}"])
def test_an_entry_that_is_no_entry(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are found; what belongs to no running job goes, whatever its key is."""
    good = json.dumps(posted()).encode()
    held = {b"07:1:a": good, b"07:2:b": value, b"\xff:3:c": value}
    monkeypatch.setattr(registry, "_store", lambda address: Store(held))
    found = registry.entries()
    assert len(found) == 2 and json.loads(good) in found
    assert {*held} == {b"07:1:a", b"07:2:b"}
    assert "replica 1 on cuda:1" in status.render(found)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"job": "07", "stats": None},
        {**posted(), "stats": {"name": "old"}},
        {**posted(), "events": [[1e17, "in no calendar"]]},
        [],
        None,
    ],
)
def test_one_entry_that_cannot_be_read(entry: Any) -> None:
    """Of another version, or of another program: the others are shown, as text and as a page."""
    text = status.render([entry, posted()])
    assert "an entry that this version cannot read" in text
    assert "replica 1 on cuda:1" in text
    shown = html_report.report([entry, posted()])
    assert "an entry that this version cannot read" in shown
    assert "replica 1 on cuda:1" in shown
