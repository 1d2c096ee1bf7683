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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from harness import Apply, ended, kill, limited, raised
from mortal import arm, fate, whole
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, GraphLost, ReplicaDied, StateChanged
from raydp_parallel.cluster import replica_set

TWO = ["cpu", "cpu"]


class Count:
    """What an executor counted since."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._before = executor.stats()

    def __call__(self) -> tuple[int, int]:
        now = self._executor.stats()
        return now.deaths - self._before.deaths, now.replays - self._before.replays


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
        with forked.held():
            assert torch.equal(model(x), expected)
            assert killable.replicas()[1].state == "dead"
            assert killable.stats().respawns == before.respawns
        whole(killable)
    after = killable.stats()
    for name in ("deaths", "respawns"):  # its chunk may not have been sent any more
        assert getattr(after, name) == getattr(before, name) + 1
    (line,) = [r.getMessage() for r in caplog.records if "died" in r.getMessage()]
    parts = "replica 1 for device cpu", f"pid {lost.pid}", lost.node[:8], "in forward", "run again"
    assert all(part in line for part in parts), line
    assert "deaths" in str(after)
    first, second = before.replicas
    assert [r.calls for r in after.replicas] == [first.calls + 2, second.calls]
    model(x)
    assert killable.stats().replicas[1].calls == before.replicas[1].calls + 1


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
        elif how == "requires_grad":
            model.module.bias.requires_grad_(False)


LONG = [
    pytest.param(how, marks=pytest.mark.long)
    for how in ("behind its version", "attribute", "arguments")
]


@pytest.mark.parametrize("how", ["parameter 'weight'", "requires_grad", *LONG])
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


def spoil(net: Any, x: Tensor, spoils: bool = False) -> Tensor:
    """Writes to a large sparse tensor, which nothing but a message can bring back."""
    if spoils:
        net.large.mul_(2.0)
    out: Tensor = net.layer(x)
    return out


def test_a_graph_is_made_again_where_a_map_has_written(killable: Executor) -> None:
    """The replica that makes it says that it lacks contents, and gets them."""
    net = Apply(spoil, layer=nn.Linear(4, 2), large=torch.eye(600).to_sparse())
    model = DataParallel(net, executor=killable)
    loss = model(torch.ones(4, 4)).sum()
    assert len([*model.map([(torch.ones(4, 4), True)] * 2)]) == 2
    kill(killable, 1)
    loss.backward()
    assert torch.equal(net.layer.weight.grad, torch.full((2, 4), 4.0))


class Poison(nn.Module):
    """Ends every process that runs chunk 1."""

    def forward(self, x: Tensor) -> Tensor:
        if int(x[0]) == 1:
            os._exit(3)
        return x


@pytest.mark.long
def test_a_chunk_that_ends_whoever_runs_it(
    killable: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Is given up after a few, between which it pauses for ever longer, with an error that says so;
    the next call works.
    """
    monkeypatch.setattr(replica_set, "_PAUSES", (0.01, 0.04))
    model = DataParallel(Poison(), executor=killable)
    text = r"^6 replicas died of chunk 1 in forward.* .*ends its process"
    with pytest.raises(ReplicaDied, match=text):
        model(torch.arange(2.0))
    assert "2 replicas ended before they answered; the next starts in 0.04 s" in caplog.text
    assert model(torch.tensor([0.0, 2.0])).tolist() == [0.0, 2.0]


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
def test_a_chunk_that_hangs_whoever_runs_it(tmp_path: Path) -> None:
    """Two of its replicas count as dead and are ended; then the call raises."""
    with Executor(TWO) as executor:
        model = DataParallel(Stops(tmp_path), executor=executor)
        model(torch.tensor([0.0, 2.0]))
        for number in range(2):
            (tmp_path / f"stop {number}").touch()
        what = r"^2 replicas died of chunk .*: no answer within 3 s.*call_timeout"
        # Only calls of the chunk have a limit: others may take their time on a busy machine.
        with (
            limited(executor, 3.0, lambda call: call.chunk.number == 1),
            pytest.raises(ReplicaDied, match=what),
        ):
            model(torch.arange(2.0))
        pids = [int(path.name[4:]) for path in tmp_path.iterdir()]
        assert len(pids) == 2 and all(map(ended, pids))
        assert model(torch.tensor([0.0, 2.0])).tolist() == [0.0, 2.0]


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
    # Only now it waits: before, Ctrl-C could come in a finalizer, where Python drops it.
    slots = killable.replica_set.slots.values()
    thread = press_when(lambda: all(slot.successor is not None for slot in slots))
    with forked.held():
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert [info.state for info in killable.replicas()] == ["dead", "dead"]  # it did not wait
        thread.join()
    assert torch.equal(model(x), expected)


class Slow(nn.Module):
    """Takes its time in forward, or in backward."""

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


LATER = [pytest.param(phase, marks=pytest.mark.long) for phase in ("replay", "backward")]


@pytest.mark.parametrize("phase", ["forward", *LATER])
def test_ctrl_c_while_replicas_run(phase: str, killable: Executor, tmp_path: Path) -> None:
    """It comes through at once, what is answered later is dropped, no graph is left behind, and no
    replica ends.
    """
    gc.collect()  # the error of another test, with its frames and their graphs
    model, count = DataParallel(Slow(tmp_path), executor=killable), Count(killable)
    x = torch.tensor([2.0, 1.0])
    if phase == "replay":
        arm(tmp_path, "forward 1")
    name = f"slow {'backward' if phase == 'backward' else 'forward'} 1"
    (tmp_path / name).touch()
    thread = press_when((tmp_path / f"{name}, begun").exists)
    try:
        with pytest.raises(KeyboardInterrupt):  # it would wait for ever
            model(x).sum().backward()
        thread.join()
    finally:
        # whatever came of it: other tests have the same replicas, and would wait for ever
        (tmp_path / "go on").touch()
    model.zero_grad()
    model(x).sum().backward()
    assert model.module.weight.grad is not None and model.module.weight.grad.item() == 3
    assert [held for _, held in whole(killable).flush()] == [0, 0]
    assert count()[0] == (phase == "replay")  # the death that it is of
