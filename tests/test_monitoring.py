"""Statistics, their table, the status, the report, the metrics and the dashboard, without Ray."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raydp_parallel import Options, command
from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.start import Starter
from raydp_parallel.devices import threads
from raydp_parallel.driver import reporter
from raydp_parallel.errors import ClusterError
from raydp_parallel.monitoring import metrics, status
from raydp_parallel.monitoring.recorder import Recorder
from raydp_parallel.monitoring.stats import ExecutorStats, ReplicaInfo


class Fake:
    """An executor with two replicas whose clock is set by hand."""

    def __init__(self, name: str = "train") -> None:
        self.now = 100.0
        self.recorder = Recorder(name, lambda: self.now)
        self.infos = [
            ReplicaInfo(0, "cuda:0", "a1b2", 4711, "ready", "NVIDIA H100 80GB HBM3", 345_000_000),
            ReplicaInfo(1, "cpu", "a1b2", 4712, "dead"),
        ]
        for info in self.infos:
            self.recorder.started(info)
        self.shown: list[str] = []
        client = SimpleNamespace(show=self.shown.append)
        slots = {0: SimpleNamespace(client=client), 1: None}
        self.replica_set = SimpleNamespace(slots=slots, recorder=self.recorder)

    def step(self, index: int = 0, rows: int = 60) -> None:
        """One second in which a replica waits 0.3 s, works 0.6 s, and a call travels 0.1 s."""
        self.now += 0.3
        self.recorder.called(index)
        self.now += 0.7
        self.recorder.answered(index, 0.6, [2_000_000, 1_000_000], (rows, "ResNet"))
        self.recorder.totals.forwards += 1

    def stats(self) -> ExecutorStats:
        return self.recorder.stats(self.infos, "windows + ipc")


def entry(now: ExecutorStats, age: int = 0) -> dict[str, Any]:
    """What status and report get: it went through Ray's key-value store."""
    made = status.entry(now)
    return {**json.loads(json.dumps(made)), "posted": made["posted"] - age, "host": "host7"}


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> Fake:
    return Fake(request.node.name)  # a name of its own: a second one of a name gets a number


def test_the_table_shows_the_last_seconds_in_100_columns() -> None:
    """After an hour; what was counted is of all of it."""
    fake = Fake("table")
    fake.step(rows=10_000_000)
    fake.stats()
    fake.now += 3600
    fake.stats()
    for _ in range(10):
        fake.step()
        lines = str(fake.stats()).splitlines()
    title, recent, head, first, second, _, _, total, *_ = lines
    assert title == "table, transport: shared memory + ipc"
    assert recent.startswith("the last 10 s: 10 forwards (1.0 per second), 0 backwards")
    assert total.startswith("in all 3,611 s: 11 forwards (0.0 per second)")
    assert head.split()[:5] == ["replica", "pid", "model", "rows/s", "busy"]
    assert " ".join(first.split()) == "0 cuda:0 H100 80 4711 ResNet 60 60% 30% 10% 22.0 11.0 345"
    assert " ".join(second.split()) == "1 cpu dead 4712 0 0% 100% 0% 0.0 0.0 0.0"
    assert max(map(len, lines)) <= 100, lines
    assert "in place\n0 forwards" in str(ExecutorStats("net", (), "in place"))
    assert "<td>0 cuda:0 NVIDIA H100 80GB HBM3</td>" in fake.stats()._repr_html_()


def test_no_counter_shrinks_where_a_cluster_was_left() -> None:
    """Its replicas waited until others took their places: Ray's counters refuse less."""
    fake = Fake("left")
    fake.now += 5
    before = fake.stats()
    fake.recorder.started(fake.infos[0])
    assert min(more for *_, more in metrics.increments(fake.stats().since(before))) >= 0


def test_status_has_the_table_of_each_executor(fake: Fake) -> None:
    fake.step()
    fake.recorder.event("something\x1b[2J rare")
    about, *lines = status.render([entry(fake.stats())]).splitlines()
    assert about.endswith("on host7") and lines[:-1] == str(fake.stats()).splitlines()[:-1]
    assert lines[-1].endswith("something\N{REPLACEMENT CHARACTER}[2J rare")
    assert "No executor runs here" in status.render([])
    assert "last heard of 60 s ago" in status.render([entry(fake.stats(), age=60)])


def test_the_report_is_one_page_without_scripts(fake: Fake) -> None:
    fake.step()
    fake.recorder.event("<script>alert(1)</script>")
    text = status.page([entry(fake.stats())])
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
    assert "<td>60% <meter max=100 value=60></meter></td>" in text
    assert "<script" not in text and "http://" not in text


def test_the_dashboard_asks_for_exactly_the_metrics_that_exist() -> None:
    text = command._DASHBOARD.read_text()
    names = {f"ray_{name}_total" for name, *_ in metrics.increments(Fake("names").stats())}
    names.add(f"ray_{metrics.INFO[0]}")
    assert set(re.findall(r"ray_raydp_\w+", text)) == names


class Cluster:
    """What the reporter tells Ray."""

    def __init__(self, patch: Callable[..., None]) -> None:
        self.sums: dict[tuple[str, ...], float] = {}
        self.entries: dict[str, str] = {}
        patch(ray_api, "add_to_counter", self.count)
        patch(ray_api, "set_gauge", self.gauge)
        patch(ray_api, "connected", lambda: True)
        patch(ray_api, "put_entry", self.entries.__setitem__)
        patch(ray_api, "delete_entry", self.entries.pop)
        patch(ray_api, "entries", lambda address=None: [*self.entries.values()])

    def count(self, name: str, description: str, tags: dict[str, str], value: float) -> None:
        key = (name, *tags.values())
        self.sums[key] = self.sums.get(key, 0.0) + value

    def gauge(self, name: str, description: str, tags: dict[str, str], value: float) -> None:
        self.sums[(name, *tags.values())] = value


def test_the_reporter_and_the_commands(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any
) -> None:
    cluster = Cluster(monkeypatch.setattr)
    monkeypatch.setattr(reporter, "EVERY", 3600.0)
    watching = reporter.Reporter(fake.replica_set, lambda: fake.stats)
    for _ in range(5):
        fake.step()
        watching._report()
    (name,) = fake.shown
    assert name.replace("\xa0", " ") == "replica 0, ResNet: 60 samples per second, 60 % busy"
    monkeypatch.setattr(command.time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
    for arguments, rc in ((["status"], 0), (["status", "--watch"], 130)):
        assert command.main(arguments) == rc
        assert fake.recorder.name in capsys.readouterr().out
    assert command.main(["report", str(tmp_path / "page.html")]) == 0
    assert "rows/s" in (tmp_path / "page.html").read_text()
    fake.step()
    watching.close()
    watching.close()
    place = (fake.recorder.name, "0", "cuda:0", "a1b2")
    assert cluster.sums[("raydp_samples", *place)] == 360
    assert cluster.sums[("raydp_replica_info", *place, "NVIDIA H100 80GB HBM3", "4711")] == 0
    assert fake.recorder.name not in cluster.entries  # others of this process may write theirs


def test_commands_fail_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(address: str | None = None) -> list[str]:
        raise ClusterError(f"no Ray cluster at {address}")

    monkeypatch.setattr(ray_api, "entries", none)
    assert command.main(["status", "--address", "nowhere"]) == 1
    assert capsys.readouterr().err == "raydp-parallel: no Ray cluster at nowhere\n"
    found = subprocess.check_output([sys.executable, "-m", "raydp_parallel", "grafana"])
    assert json.loads(found)["title"] == "raydp_parallel"


def test_commands_need_no_torch() -> None:
    """Its import takes two seconds."""
    code = "import sys, raydp_parallel.command, raydp_parallel.cluster.ray_api as api; assert api"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=True)


def test_dead_clusters_are_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that run here the others are shown; alone, it says which did not answer."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_api, "_running", lambda: [dead])
    with pytest.raises(ClusterError, match=f"{dead} does not answer.*RAY_AUTH_MODE=token"):
        ray_api.entries()
    real = ray_api._entries
    monkeypatch.setattr(ray_api, "_entries", lambda a: ["{}"] if a == "alive" else real(a))
    monkeypatch.setattr(ray_api, "_running", lambda: [dead, "alive"])
    assert ray_api.entries() == ["{}"]


def test_only_clusters_of_one_s_own_are_told_the_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Another user's process may look like one of Ray's."""
    raylet = shutil.copy("/bin/sh", tmp_path / "raylet")
    command = [raylet, "-c", "read line", "--gcs-address=host:1 --b"]
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        assert "host:1" in ray_api._running()
        monkeypatch.setattr(ray_api.os, "getuid", lambda: 4321)
        assert "host:1" not in ray_api._running()


def test_cpu_replicas_have_no_more_threads_than_the_program_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch.set_num_threads after the import; else a share of the cores."""
    starter = object.__new__(Starter)
    vars(starter).update(_options=Options(threads=None), _told=16, _nodes=1, _cores=16)
    starter.alive = lambda: True
    monkeypatch.setattr(threads, "AT_START", 8)
    for own, each in ((8, 8), (9, 8), (3, 3), (1, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda own=own: own)
        assert starter.threads(2) == each
