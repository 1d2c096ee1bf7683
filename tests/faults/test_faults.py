"""Faults: whatever dies, and whenever, training goes on, and ends with the bits that it would have
had.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from harness import limited, raised
from mortal import Everything, Mortal, arm, armed, fate, rows, same, state, train, whole
from torch import Tensor, nn

from raydp_parallel import (
    DataParallel,
    Executor,
    GraphLost,
    Options,
    ReplicaDied,
    RestartsSpent,
    StateChanged,
    cluster,
    devices,
    parallel_apply,
    replicate,
)

pytestmark = pytest.mark.usefixtures("cluster")

TWO = ["cpu", "cpu"]


def ended(pid: int) -> bool:
    """Waits for a process to end."""
    for _ in range(2000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.005)
    return False


def kill(executor: Executor, *numbers: int) -> None:
    """End replicas from outside, and wait until they are gone."""
    pids = [executor.replicas()[number].pid for number in numbers]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert all(map(ended, pids))


class Count:
    """What an executor counted since."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._before = executor.stats()

    def __call__(self) -> tuple[int, int]:
        now = self._executor.stats()
        return now.deaths - self._before.deaths, now.replays - self._before.replays


# --- the same bits ---

PLAN: dict[int, Sequence[str]] = {
    0: ["forward 1"],
    1: ["late forward 0"],
    2: ["backward 1"],
    3: ["backward 0", "backward 0"],  # the second time in the replay
}


def undisturbed(chunks: int, folder: Path, steps: int, **how: Any) -> list[Tensor]:
    """What comes of it if no replica dies."""
    with Executor(["cpu"] * chunks, options=Options(in_process=True, threads=1)) as executor:
        return train(executor, folder, steps, {}, **how)


@pytest.mark.parametrize(
    ("chunks", "how", "plan"),
    [
        (2, {"twice": True}, {0: ["forward 1"], 2: ["backward 0"]}),
        pytest.param(2, {"twice": True}, PLAN, marks=pytest.mark.long),
        pytest.param(3, {"checkpointed": True}, PLAN, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_training_ends_with_the_same_bits(
    chunks: int,
    how: dict[str, Any],
    plan: dict[int, Sequence[str]],
    executors: Any,
    tmp_path: Path,
) -> None:
    """Deaths in forward and backward, of chunk 0 and of others, in a replay: losses, state and
    generator are equal.
    """
    expected = undisturbed(chunks, tmp_path, 5, **how)
    executor = executors(chunks, name="killable")
    count = Count(executor)
    found = train(executor, tmp_path, 5, plan, **how)
    assert armed(tmp_path) == []
    assert same(found, expected)
    assert count()[0] == sum(map(len, plan.values()))


@pytest.mark.long
def test_a_gradient_penalty_ends_with_the_same_bits(killable: Executor, tmp_path: Path) -> None:
    """Graphs of graphs are made again, too: deaths in the first derivative, in the second, and
    between.
    """
    plan = {0: ["second 1"], 1: ["forward 0", "backward 1"], 2: ["second 0"]}
    expected = undisturbed(2, tmp_path, 4, penalty=True, twice=True)
    found = train(killable, tmp_path, 4, plan, penalty=True, twice=True)
    assert armed(tmp_path) == []
    assert same(found, expected)


@pytest.mark.long
def test_the_death_of_all_between_forward_and_backward(killable: Executor, tmp_path: Path) -> None:
    """No replica is left to take over: backward waits for the first that comes back."""

    def backward(executor: Executor, deadly: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = DataParallel(Mortal(Everything(), tmp_path), executor=executor)
        loss = model(rows(2, 0)).square().mean()
        if deadly:
            kill(executor, 0, 1)
        loss.backward()
        return state(model)

    with Executor(TWO, options=Options(in_process=True, threads=1)) as executor:
        expected = backward(executor, False)
    assert same(backward(killable, True), expected)


@pytest.mark.long
def test_a_call_does_not_wait_for_the_new_process(
    killable: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    """A survivor does the work at once; what died, of what, and what was done is one line; the
    counters tell, too.
    """
    model = DataParallel(nn.Linear(4, 2), executor=killable)
    x = torch.ones(4, 4)
    expected = model(x)
    lost, before = killable.replicas()[1], killable.stats()
    kill(killable, 1)
    with caplog.at_level(logging.INFO, "raydp_parallel"):
        assert torch.equal(model(x), expected)
        assert (
            killable.replicas()[1].state == "dead" and killable.stats().respawns == before.respawns
        )
        whole(killable)
    after = killable.stats()
    assert (after.deaths, after.replays, after.respawns) == (
        before.deaths + 1,
        before.replays + 1,
        before.respawns + 1,
    )
    assert after.lost_ms > before.lost_ms
    (line,) = [r.getMessage() for r in caplog.records if "died" in r.getMessage()]
    for part in (
        "replica 1 for device cpu",
        f"pid {lost.pid}",
        lost.node_id[:8],
        "in forward",
        "run again",
    ):
        assert part in line
    assert "deaths" in str(after)
    assert [r.calls for r in after.replicas] == [
        before.replicas[0].calls + 2,
        before.replicas[1].calls,
    ]
    model(x)
    assert killable.stats().replicas[1].calls == before.replicas[1].calls + 1


def test_a_replica_that_somebody_killed_through_ray(killable: Executor) -> None:
    """``ray.kill`` from outside is a death like any other."""
    model = DataParallel(nn.Linear(4, 2), executor=killable)
    expected = model(torch.ones(4, 4))
    pid = killable.replicas()[0].pid
    ray.kill(killable.slots(TWO)[0].client.actor)
    assert ended(pid)
    assert torch.equal(model(torch.ones(4, 4)), expected)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"direct_line": False}, {"link": "object_store"}], ids=str)
def test_every_way_of_calling_survives(
    options: dict[str, Any], tmp_path: Path, executors: Any
) -> None:
    """As Ray tasks, and by each link."""
    expected = undisturbed(2, tmp_path, 2)
    executor = executors(name="killable", **options)
    found = train(executor, tmp_path, 2, {0: ["late forward 1"], 1: ["backward 0"]})
    assert same(found, expected)


# --- exactly once ---


class Noisy(nn.Module):
    """Warns, counts its calls in a buffer, and its process may end in backward."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.folder = str(folder)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        warnings.warn(f"chunk {int(x[0])}", stacklevel=1)
        out, chunk = x * self.weight, int(x[0])
        out.register_hook(lambda grad: fate(self.folder, f"backward {chunk}"))
        return out


@pytest.mark.long
def test_effects_take_place_once(killable: Executor, tmp_path: Path) -> None:
    """Of a forward that ran twice: one write-back, one warning, one gradient, its rows counted
    once.
    """
    model = DataParallel(Noisy(tmp_path), executor=killable)
    before = sum(r.rows for r in killable.stats().replicas)
    arm(tmp_path, "backward 0", "backward 1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.arange(2.0)).sum().backward()
    assert sorted(str(w.message) for w in caught) == ["chunk 0", "chunk 1"]
    assert model.module.calls.item() == 1
    assert model.module.weight.grad is not None and model.module.weight.grad.item() == 1
    assert sum(r.rows for r in killable.stats().replicas) == before + 2
    assert [held for _, held in whole(killable).flush()] == [0, 0]


class Raising(nn.Module):
    """Raises in one chunk, and ends the process of another."""

    def __init__(self, folder: Path, raises: int) -> None:
        super().__init__()
        self.folder = str(folder)
        self.raises = raises

    def forward(self, x: Tensor) -> Tensor:
        chunk = int(x[0])
        fate(self.folder, f"forward {chunk}")
        if chunk == self.raises:
            raise ValueError(f"chunk {chunk}")
        return x


@pytest.mark.parametrize("raises", [0, pytest.param(1, marks=pytest.mark.long)])
def test_an_exception_and_a_death_in_one_call(
    raises: int, killable: Executor, tmp_path: Path
) -> None:
    """The user's exception is raised, and the death is healed all the same."""
    model = DataParallel(Raising(tmp_path, raises), executor=killable)
    count = Count(killable)
    arm(tmp_path, f"forward {1 - raises}")
    with pytest.raises(ValueError, match=f"Caught ValueError in replica {raises}"):
        model(torch.arange(2.0))
    assert count() == (1, 1)
    assert whole(killable)


class Remembers(nn.Module):
    """Keeps what it saw, and what it saw before has its part in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        out = (x * self.weight * self.times).square() + getattr(self, "last", torch.zeros(1))
        self.times, self.last = self.times + 1, out.detach()[:1]
        return out


@pytest.mark.long
def test_one_device_that_rebinds_attributes(executors: Any) -> None:
    """They come back to the module; a replay finds what the forward found, and changes nothing."""
    found = []
    executor = executors(1, name="killable")
    for deadly in (False, True):
        model = DataParallel(Remembers(), executor=whole(executor))
        for number in range(3):
            out = model(torch.ones(2))
            if deadly and number:
                kill(executor, 0)
            out.sum().backward()
        module = model.module
        found.append([module.weight.grad.item(), module.times, module.last.item(), out.tolist()])
    assert found[0] == found[1] and found[0][1] == 4


class StoresInArguments(nn.Module):
    """Stores in what it is given: an attribute with a graph, and a tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, given: Any) -> Tensor:
        out = (x * self.weight + given.state.total).square()
        given.state.out = out * 2
        given.state.total += 1
        return out


@pytest.mark.parametrize("died", ["before backward", "in forward"])
def test_one_device_that_stores_in_its_arguments(died: str, killable: Executor) -> None:
    """It is stored once, and a replay of the graph finds what the forward found."""
    found = []
    for deadly in (False, True):
        model = DataParallel(StoresInArguments(), ["cpu"], executor=whole(killable))
        given = SimpleNamespace(state=SimpleNamespace(total=torch.zeros(2)))
        for number in range(3):
            if deadly and number == 1 and died == "in forward":
                kill(killable, 0)
            out = model(torch.ones(2), given)
            if deadly and number == 1 and died == "before backward":
                kill(killable, 0)
            (out.sum() + given.state.out.sum()).backward()
        found.append([model.module.weight.grad.item(), given.state.total.tolist(), out.tolist()])
    assert found[0] == found[1]
    assert found[0][1] == [3.0, 3.0]


class StoresInAttributes(StoresInArguments):
    """The same, with an object of its own, and an array."""

    def __init__(self) -> None:
        super().__init__()
        self.given = SimpleNamespace(state=SimpleNamespace(total=torch.zeros(2)))
        self.runs = np.ones(2)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        self.given.state.total = self.given.state.total * 1
        out = super().forward(x, self.given) * float(self.runs[0])
        self.runs += 1
        out.register_hook(self.keep)
        return out

    def keep(self, gradient: Tensor) -> None:
        """Keep a gradient."""
        self.gradient = gradient


@pytest.mark.parametrize("died", ["before backward", "in forward"])
def test_one_device_that_stores_in_its_attributes(died: str, killable: Executor) -> None:
    """It is stored once, and a replay of the graph finds what the forward found."""
    found = []
    for deadly in (False, True):
        net = StoresInAttributes()
        model = DataParallel(net, ["cpu"], executor=whole(killable))
        for number in range(3):
            if deadly and number == 1 and died == "in forward":
                kill(killable, 0)
            out = model(torch.ones(2))
            if deadly and number == 1 and died == "before backward":
                kill(killable, 0)
            (out.sum() * number + net.given.state.out.sum()).backward()
            assert net.gradient.tolist() == [number, number]
        assert net.weight.grad is not None
        found.append([net.weight.grad.item(), net.given.state.total.tolist(), out.tolist()])
        assert net.runs.tolist() == [4.0, 4.0]
    assert found[0] == found[1]
    assert found[0][1] == [3.0, 3.0]


class KeepsFeatures(StoresInAttributes):
    """Keeps features, and what hooks see of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        self.features = super().forward(x) * 2
        self.features.register_hook(self.see)
        return self.features * self.weight

    def see(self, gradient: Tensor) -> None:
        """Keep it."""
        self.seen.append(gradient)


@pytest.mark.parametrize("died", ["before the first", "before the second"])
def test_an_output_s_gradient_after_a_death(died: str, killable: Executor) -> None:
    """The graph is made again, and what hooks did is done once."""
    found = []
    for deadly in (False, True):
        net = KeepsFeatures()
        model = DataParallel(net, ["cpu"], executor=whole(killable))
        out = model(torch.ones(2))
        if deadly and died == "before the first":
            kill(killable, 0)
        given = torch.autograd.grad(out.sum(), net.features, retain_graph=True)
        if deadly and died == "before the second":
            kill(killable, 0)
        net.features.retain_grad()
        (out.square().sum() + net.features.sum()).backward()
        found.append([*given, net.features.grad, net.weight.grad, net.gradient, *net.seen])
        assert len(net.seen) == 2
    torch.testing.assert_close(found[1], found[0])


# --- what cannot be made again ---


def change(how: str, model: Any, x: Tensor) -> None:
    """Change what the forward was made with."""
    with torch.no_grad():
        if how == "parameter 'weight'":
            model.module.weight.mul_(2)
        elif how == "behind its version":
            model.module.weight.data.numpy()[:] = 2
        elif how == "attribute":
            model.module.eval()
        elif how == "arguments":
            x.zero_()


@pytest.mark.parametrize(
    "how",
    [
        "parameter 'weight'",
        pytest.param("behind its version", marks=pytest.mark.long),
        pytest.param("attribute", marks=pytest.mark.long),
        pytest.param("arguments", marks=pytest.mark.long),
    ],
)
def test_a_graph_of_another_state_is_not_made(how: str, killable: Executor) -> None:
    """A named error; no gradient is left, and what the graph needs not is not minded."""
    model = DataParallel(nn.Linear(4, 2), executor=killable)
    x = torch.randn(4, 4)
    loss = model(x).sum()
    kill(killable, 1)
    change(how, model, x)
    words = how if how != "behind its version" else "parameter 'weight'"
    error = raised(lambda: loss.backward(retain_graph=True))
    assert isinstance(error, StateChanged) and isinstance(error, GraphLost), error
    assert words in str(error) and "run forward again" in str(error)
    assert model.module.weight.grad is None
    model(x).sum().backward()
    assert model.module.weight.grad is not None


# --- what dies for ever ---


class Poison(nn.Module):
    """Ends every process that runs chunk 1."""

    def forward(self, x: Tensor) -> Tensor:
        if int(x[0]) == 1:
            os._exit(3)
        return x


@pytest.mark.long
def test_a_chunk_that_ends_whoever_runs_it(killable: Executor) -> None:
    """Is given up after a few, with an error that says so; the next call works."""
    with pytest.raises(
        ReplicaDied,
        match=r"^6 replicas died of chunk 1 in forward.* .*ends "
        r"its process",
    ):
        DataParallel(Poison(), executor=killable)(torch.arange(2.0))
    assert DataParallel(Poison(), executor=killable)(torch.tensor([0.0, 2.0])).tolist() == [
        0.0,
        2.0,
    ]


@pytest.mark.long
def test_the_budget_of_restarts() -> None:
    """Spent, calls go on with those that are left; without any there is a clear error."""
    with Executor(TWO, options=Options(max_restarts_per_hour=0)) as executor:
        model = DataParallel(nn.Linear(4, 2), executor=executor)
        x = torch.ones(4, 4)
        expected = model(x)
        kill(executor, 1)
        for _ in range(2):
            out = model(x)
            assert torch.equal(out, expected)
        kill(executor, 0)
        for use in (lambda: model(x), lambda: out.sum().backward()):
            with pytest.raises(RestartsSpent, match="max_restarts_per_hour=0"):
                use()


class Stops(nn.Module):
    """Its process is stopped, once for each file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def forward(self, x: Tensor) -> Tensor:
        for name in os.listdir(self.folder):
            if int(x[0]) == 1 and not name.startswith("pid"):
                os.unlink(os.path.join(self.folder, name))
                Path(self.folder, f"pid {os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
                threading.Event().wait()  # the signal may find another thread first
        return x


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
def test_a_replica_that_hangs(times: int, tmp_path: Path) -> None:
    """It counts as dead and is ended; its chunk runs once more; if that hangs too, the call
    raises.
    """
    with Executor(TWO) as executor:
        model = DataParallel(Stops(tmp_path), executor=executor)
        model(torch.tensor([0.0, 2.0]))
        for number in range(times):
            (tmp_path / f"stop {number}").touch()
        with limited(executor, 3.0):
            if times == 1:
                assert model(torch.arange(2.0)).tolist() == [0.0, 1.0]
            else:
                what = r"^2 replicas died of chunk .*: no answer .* call_timeout=3.0 s"
                with pytest.raises(ReplicaDied, match=what):
                    model(torch.arange(2.0))
        pids = [int(path.name[4:]) for path in tmp_path.iterdir()]
        assert len(pids) == times and all(map(ended, pids))
        assert model(torch.tensor([0.0, 2.0])).tolist() == [0.0, 2.0]


# --- what is no death ---


class Spoils(nn.Module):
    """Leaves its device useless, as an access to memory that is not there does on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] < 0:
            devices.spoiled = lambda _device: True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return x * self.scale


@pytest.mark.long
def test_a_replica_whose_device_is_spoiled_is_replaced(killable: Executor) -> None:
    """Its error is raised; its process ends with the next call, which is as right as ever, and
    another one comes.
    """
    model = DataParallel(Spoils(), TWO, executor=killable)
    x = torch.ones(4, 2)
    assert torch.equal(model(x), x)
    victim, before = killable.replicas()[1].pid, killable.stats().deaths
    bad = x.clone()
    bad[2:] = -1
    with pytest.raises(RuntimeError, match="illegal memory access"):
        model(bad)
    assert killable.stats().deaths == before
    out = model(x)
    assert torch.equal(out, x)
    out.sum().backward()
    assert model.module.scale.grad == 8
    assert killable.stats().deaths == before + 1
    assert ended(victim)


class Greedy(nn.Module):
    """Asks for more memory than there is, in chunk 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, much: bool) -> Tensor:
        out = (x * self.weight).exp()
        return out + torch.empty(1 << 52).sum() if much and int(x[0]) == 1 else out


@pytest.mark.long
def test_out_of_memory_is_an_exception(killable: Executor) -> None:
    """The replica lives on, and holds nothing of the forward that failed."""
    model = DataParallel(Greedy(), executor=killable)
    before = killable.replicas()
    gc.collect()  # graphs of tests before this one, which their errors hold
    with pytest.raises(RuntimeError, match=r"in replica 1 .*(?s:.*)memory"):
        model(torch.arange(2.0), True)
    assert [held for _, held in killable.flush()] == [0, 0]
    model(torch.arange(2.0), False).sum().backward()
    assert killable.replicas() == before


# --- Ctrl-C ---


def press_when(happens: Callable[[], bool]) -> threading.Thread:
    """Press Ctrl-C as soon as something is so; never in another test, should this one fail
    before.
    """
    late = time.monotonic() + 60

    def press() -> None:
        while not happens():
            time.sleep(0.002)
            if time.monotonic() > late:
                return
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


@pytest.mark.long
def test_ctrl_c_while_everybody_is_dead(killable: Executor) -> None:
    """A call that waits for a new replica is left at once; the next call waits in its turn, and is
    right.
    """
    model = DataParallel(nn.Linear(4, 2), executor=killable)
    x = torch.ones(4, 4)
    expected = model(x)
    kill(killable, 0, 1)
    thread = press_when(lambda: [info.state for info in killable.replicas()] == ["dead", "dead"])
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert time.monotonic() - begun < 30
    assert [info.state for info in killable.replicas()] == [
        "dead",
        "dead",
    ]  # it did not wait for them
    thread.join()
    assert torch.equal(model(x), expected)


class Slow(nn.Module):
    """Takes its time in a replay, and in backward."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        chunk = int(x[0])
        fate(self.folder, f"forward {chunk}")
        self._pause(f"slow forward {chunk}")
        out = x * self.weight
        out.register_hook(lambda grad: self._pause(f"slow backward {chunk}"))
        return out

    def _pause(self, name: str) -> None:
        path = Path(self.folder, name)
        if path.exists():
            path.rename(f"{path}, begun")
            while not Path(self.folder, "go on").exists():
                time.sleep(0.005)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["replay", "backward"])
def test_ctrl_c_in_a_replay_and_in_backward(phase: str, killable: Executor, tmp_path: Path) -> None:
    """It comes through at once, what is answered later is dropped, and no graph is left
    behind.
    """
    model = DataParallel(Slow(tmp_path), executor=killable)
    x = torch.tensor([2.0, 1.0])
    if phase == "replay":
        arm(tmp_path, "forward 1")
    name = f"slow {'backward' if phase == 'backward' else 'forward'} 1"
    (tmp_path / name).touch()
    thread = press_when((tmp_path / f"{name}, begun").exists)
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            model(x).sum().backward()
        waited = time.monotonic() - begun
        thread.join()
    finally:
        # whatever came of it: other tests have the same replicas, and would wait for ever
        (tmp_path / "go on").touch()
    assert waited < 30
    model.zero_grad()
    model(x).sum().backward()
    assert model.module.weight.grad is not None and model.module.weight.grad.item() == 3
    assert [held for _, held in whole(killable).flush()] == [0, 0]


@pytest.mark.long
def test_ctrl_c_while_replicas_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was started so far is ended, and the next start works."""
    clients: list[Any] = []
    wait = cluster.RayBackend._await

    def interrupted(self: Any, refs: list[Any], *others: Any) -> list[Any]:
        clients.extend(refs)
        monkeypatch.setattr(cluster.RayBackend, "_await", wait)
        os.kill(os.getpid(), signal.SIGINT)
        return wait(self, refs, *others)

    monkeypatch.setattr(cluster.RayBackend, "_await", interrupted)
    with Executor(()) as executor:
        model = DataParallel(nn.Linear(4, 2), TWO, executor=executor)
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(4, 4))
        assert time.monotonic() - begun < 30
        for hello in clients:
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(hello)
        assert model(torch.ones(4, 4)).shape == (4, 2)


@pytest.mark.long
def test_close_while_a_replica_starts(killable: Executor) -> None:
    """Nothing is left of it, and no thread."""
    executor = Executor(TWO)
    model = DataParallel(nn.Linear(4, 2), executor=executor)
    model(torch.ones(4, 4))
    kill(executor, 1)
    model(torch.ones(4, 4))
    begun = time.monotonic()
    executor.close()
    assert time.monotonic() - begun < 30
    respawner: Any = executor.replica_set._respawner
    assert not respawner._working


# --- several callers ---


def test_replicas_that_are_held_and_threads(killable: Executor) -> None:
    """Calls of a held replica are served by another; those of other threads are, too."""
    net = nn.Linear(4, 2)
    held = replicate(net, TWO, executor=killable)
    x = torch.ones(2, 4)
    expected = held[1](x)
    kill(killable, 1)
    results: list[Sequence[Tensor]] = []
    threads = [
        threading.Thread(target=lambda: results.append(parallel_apply(held, [x, x])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, expected) for outs in results for out in outs) and len(results) == 4
    assert torch.equal(held[1](x), expected)
