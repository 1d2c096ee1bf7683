"""What a user sees of replicas that really run: names, statistics, traces, ranges, entries, and
that little is left.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from threaded import together
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor, Options, command
from raydp_parallel.cluster import registry
from raydp_parallel.monitoring.stats import ExecutorStats

pytestmark = pytest.mark.usefixtures("cluster")

HERE = Options(in_process=True)
"""For what only the driver's side tells."""


class Counting(nn.Module):
    """Changes an attribute with each forward in the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def train(model: DataParallel, steps: int = 8) -> None:
    """Some steps."""
    x = torch.randn(6, 4)
    for _ in range(steps):
        model(x).sum().backward()


@pytest.mark.long
def test_replicas_have_names_and_a_second_process_has_a_number() -> None:
    """The executor's, the replica's and the device's; GPUs under the number that the user gave."""
    raydp_parallel.shutdown()  # other tests' replicas hold the GPUs
    with Executor(["cpu", 1], options=Options(name="named")) as executor:
        assert ray.get_actor("raydp:named:0@cpu")
        assert ray.get_actor("raydp:named:1@cuda:1")
        model = DataParallel(nn.Linear(4, 2), executor=executor)
        train(model, 2)
        ray.kill(ray.get_actor("raydp:named:0@cpu"))
        patience = time.monotonic() + 60
        while not executor.stats().respawns and time.monotonic() < patience:
            train(model, 1)  # the first ones may come before the death
        assert ray.get_actor("raydp:named:0@cpu~2")
        assert "took the place" in executor.recorder.events[-1][1]


@pytest.mark.long
def test_executors_of_one_name_share_a_cluster() -> None:
    with (
        Executor(["cpu"], options=Options(name="twice")) as one,
        Executor(["cpu"], options=Options(name="twice", threads=1)) as other,
    ):
        assert (one.stats().name, other.stats().name) == ("twice", "twice/2")
        assert ray.get_actor("raydp:twice:0@cpu")
        assert ray.get_actor("raydp:twice/2:0@cpu")


def test_phases_add_up_with_real_replicas(executors: Any) -> None:
    """Between two looks, for each replica, and the driver's too."""
    executor = executors()
    model = DataParallel(nn.Linear(4, 2), executor=executor)
    train(model, 2)
    outside, before, inside = time.perf_counter(), executor.stats(), time.perf_counter()
    train(model, 30)
    least, after, most = (
        time.perf_counter() - inside,
        executor.stats(),
        time.perf_counter() - outside,
    )
    for one, other in zip(before.replicas, after.replicas, strict=True):
        assert 0.95 * least <= other.phases.total - one.phases.total <= 1.05 * most
        assert other.phases.forward > one.phases.forward
        assert other.phases.backward > one.phases.backward
        assert other.rows - one.rows == 90


def test_statistics_of_a_wrapper_are_its_own() -> None:
    with Executor(["cpu", "cpu"], options=HERE) as executor:
        one, other = (DataParallel(nn.Linear(4, 2), executor=executor) for _ in range(2))
        train(one, 3)
        train(other, 5)
        assert sum(r.rows for r in one.stats().replicas) == 18
        assert sum(r.rows for r in other.stats().replicas) == 30
        assert sum(r.rows for r in executor.stats().replicas) == 48
        assert len(executor.stats().models) == 2


def test_advice_names_what_makes_state_travel_again() -> None:
    """A list that grows in the module, with every forward."""
    with Executor(["cpu", "cpu"], options=HERE) as executor:
        net = Counting()
        model = DataParallel(net, executor=executor)
        for step in range(12):
            net.seen.append(step)
            model(torch.randn(6, 4))
        (advice,) = [found for found in executor.stats().advice if found.topic == "state"]
        assert "because seen changed: 11 times in 12 forwards" in advice.text


@pytest.mark.long
def test_a_trace_has_the_driver_and_all_replicas_on_one_clock(tmp_path: Path) -> None:
    """Each chunk's phases lie inside the call's time in the driver."""
    options = Options(profile_dir=str(tmp_path), name="traced", metrics=False)
    with Executor(["cpu", "cpu"], options=options) as executor:
        train(DataParallel(nn.Linear(4, 2), executor=executor), 4)
    (file,) = tmp_path.glob("*.trace.json")
    events = [event for event in json.loads(file.read_text()) if event["ph"] == "X"]
    calls = {
        name: [e for e in events if name in e["name"]]
        for name in ("forward #3", "backward #3", "reduce #3")
    }
    assert len(calls["reduce #3"]) == 1
    (wait,) = [event for event in calls["forward #3"] if event["name"].endswith("wait")]
    chunks = [event for event in calls["forward #3"] if "chunk" in event["name"]]
    assert sorted({event["tid"] for event in chunks}) == [1, 2]
    for event in chunks:
        assert event["ts"] + event["dur"] <= wait["ts"] + wait["dur"] + 1


@pytest.mark.parametrize("in_process", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_report_page_lies_beside_the_trace_at_the_end(tmp_path: Path, in_process: bool) -> None:
    """And not before: `raydp-parallel report` shows what runs. Also without Ray and metrics."""
    name = f"paged-{in_process}"
    options = Options(profile_dir=str(tmp_path), name=name, metrics=False, in_process=in_process)
    with Executor(["cpu", "cpu"], options=options) as executor:
        train(DataParallel(nn.Linear(4, 2), executor=executor), 4)
        assert [file.suffix for file in tmp_path.iterdir()] == [".json"]
    trace, page = sorted(tmp_path.iterdir(), key=lambda file: file.suffix != ".json")
    assert page.name == trace.name.replace(".trace.json", ".html")
    text = page.read_text()
    assert f"<h2>{name}</h2>" in text and "4 forwards and 4 backwards" in text
    assert "The last calls, on one clock" in text and re.search(r"models Linear-\d+;", text)


def test_torch_profiler_shows_the_replicas_work_as_ranges() -> None:
    with Executor(["cpu", "cpu"], options=HERE) as executor:
        model = DataParallel(nn.Linear(4, 2), executor=executor)
        train(model, 1)
        with torch.profiler.profile() as profile:
            train(model, 1)
        names = {event.key for event in profile.key_averages()}
        ranges = {
            f"raydp_parallel.{name}"
            for name in ("forward: replicas", "backward: replicas", "reduce")
        }
        assert ranges <= names


@pytest.mark.long
def test_an_entry_while_it_runs_and_none_afterwards(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Read from another process's side, through the command; the reporter's thread ends too."""
    address = ray.get_runtime_context().gcs_address
    with Executor(["cpu", "cpu"], options=Options(name="posted")) as executor:
        train(DataParallel(nn.Linear(4, 2), executor=executor))
        assert executor._reporter is not None
        now = executor._reporter._report(False)
        assert now is not None
        executor._reporter._tell(now)
        assert command.main(["status", "--address", address]) == 0
        assert "posted  pid" in capsys.readouterr().out
        page = tmp_path / "report.html"
        assert command.main(["report", "--html", str(page), "--address", address]) == 0
        assert "posted" in page.read_text()
        thread: threading.Thread = executor._reporter._thread
    thread.join(10)
    assert not thread.is_alive()
    assert not [entry for entry in registry.entries(address) if entry["stats"]["name"] == "posted"]


def test_the_entry_of_a_dead_driver_is_removed() -> None:
    """By the program that looks next; a job that Ray does not know counts as dead."""
    store: Any = registry._store(ray.get_runtime_context().gcs_address)
    store.internal_kv_put(b"ffff0000:1:gone", b"{}", True, b"raydp_parallel")
    assert not [e for e in registry.entries(ray.get_runtime_context().gcs_address) if not e]
    assert b"ffff0000:1:gone" not in store.internal_kv_keys(b"", b"raydp_parallel")


@pytest.mark.soak  # Ray takes 40 s to say so
def test_no_cluster_to_look_at_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["status", "--address", "127.0.0.1:1"]) == 1
    assert "no Ray cluster to look at" in capsys.readouterr().err


def test_without_metrics_nothing_is_reported() -> None:
    with Executor(["cpu"], options=Options(metrics=False, in_process=True)) as executor:
        assert executor._reporter is None
        train(DataParallel(nn.Linear(4, 2), executor=executor), 1)
        assert executor.stats().replicas[0].rows == 6


def test_counts_are_exact_when_several_threads_run_calls(executors: Any) -> None:
    """Rows, calls and bytes; and no call seems to be under way afterwards."""
    executor = executors()

    def unknown(stats: ExecutorStats) -> list[int]:
        """Bytes of which no account says by which way they went: those of training requests."""
        found = {one.index: one.bytes_in + one.bytes_out for one in stats.replicas}
        for (index, _), account in executor.recorder.accounts.items():
            ways = account.traffic.items()
            if index in found:
                found[index] -= sum(size for (_, way), size in ways if way in ("in", "out"))
        return [*found.values()]

    before, others = executor.stats(), unknown(executor.stats())
    models = [DataParallel(nn.Linear(4, 2), executor=executor) for _ in range(3)]
    together(*[functools.partial(train, model, 20) for model in models])
    stats = executor.stats()
    counts = [*zip(stats.replicas, before.replicas, strict=True)]
    assert [now.rows - then.rows for now, then in counts] == [180, 180]
    assert [now.calls - then.calls for now, then in counts] == [60, 60]
    assert unknown(stats) == others
    assert not executor.recorder.under_way
    assert all(r.phases.total == pytest.approx(stats.seconds, rel=0.05) for r in stats.replicas)


@pytest.fixture(scope="module")
def dying(cluster: None) -> Iterator[Executor]:
    """An executor for the tests of what a death leaves; the first one counts from nothing."""
    with Executor(["cpu", "cpu"], options=Options(name="dying")) as executor:
        yield executor


@pytest.mark.long
def test_what_runs_again_after_a_death_counts_once(dying: Executor) -> None:
    """Rows, calls and time; between a forward and its backward, so that the graph is made again
    too.
    """
    executor = dying
    model = DataParallel(nn.Linear(4, 2), executor=executor)
    train(model, 3)
    out = model(torch.randn(6, 4))
    os.kill(executor.replicas()[1].pid, signal.SIGKILL)
    out.sum().backward()
    stats = executor.stats()
    assert (stats.forwards, stats.backwards) == (4, 4)
    assert sum(replica.rows for replica in stats.replicas) == 24
    assert sum(replica.calls for replica in stats.replicas) == 8
    counted = executor.recorder.accounts.values()
    assert sum(account.forwards for account in counted) == 8
    assert sum(account.backwards for account in counted) == 8
    assert (stats.deaths, stats.replays, stats.replicas[0].replays) == (1, 1, 1)
    assert stats.lost_ms > 0
    assert all(r.phases.total == pytest.approx(stats.seconds, rel=0.05) for r in stats.replicas)
    train(model, 1)
    assert executor.stats().replays == 1
    executor.grow(float("inf"))
    assert executor.stats().respawns == 1  # a note of the death comes before
    (died,) = [text for _, text in executor.recorder.events if "died in backward" in text]
    assert "replica 1" in died


def test_exceptions_do_not_stand_in_the_replicas_log(executors: Any) -> None:
    """They are raised in the driver. Their texts may hold data, and every user of the machine may
    read Ray's logs.
    """

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(f"rows {len(x)}")

    executor = executors()
    with pytest.raises(KeyError):
        DataParallel(Fails(), executor=executor)(torch.zeros(4, 2))
    log = log_of(executor.replicas()[0].pid)
    assert "ReplicaActor" in log and "KeyError" not in log and "rows 2" not in log


@pytest.mark.long
def test_a_successor_s_log_says_why_it_is_there(dying: Executor) -> None:
    """On its page in the dashboard, where the dead one's is no longer looked at."""
    executor = dying
    model = DataParallel(nn.Linear(4, 2), executor=executor)
    train(model, 1)
    first = executor.replicas()[1].pid
    os.kill(first, signal.SIGKILL)
    patience = time.monotonic() + 60
    while (new := executor.replicas()[1].pid) == first and time.monotonic() < patience:
        train(model, 1)
    while "is here because" not in log_of(new) and time.monotonic() < patience:
        executor.flush()
    assert f"is here because replica 1 for device cpu (pid {first}, " in log_of(new)
    assert "worker process has died" in log_of(new)


def log_of(pid: int) -> str:
    """What a replica logged."""
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    (file,) = logs.glob(f"worker-*-{pid}.err")
    return file.read_text()
