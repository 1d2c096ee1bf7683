"""Whatever dies, and whenever, training ends with the bits that it would have had."""

from __future__ import annotations

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
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, GraphLost, ReplicaDied, StateChanged
from raydp_parallel.cluster import replica_set

TWO = ["cpu", "cpu"]


def meet(net: nn.Module, x: Tensor, seen: Path) -> Tensor:
    """Run forward: chunk 0 waits until chunk 2 has begun."""
    if x.item() == 2:
        seen.touch()
    while x.item() == 0 and not seen.exists():
        time.sleep(0.001)
    return net(x)  # type: ignore[no-any-return]


def test_a_call_does_not_wait_for_the_new_process(
    executors: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A survivor does the work at once, and no other waits for it; one line and counters tell."""
    three = executors(3, name="killable")
    model, x = DataParallel(nn.Linear(1, 2), executor=three), torch.arange(3.0).view(3, 1)
    expected = model(x)
    lost, before = three.replicas()[0], three.stats()
    kill(three, 0)
    with caplog.at_level(logging.INFO, "raydp_parallel"):
        with forked.held():
            assert torch.equal(model(x), expected)
            assert torch.equal(model.run(meet, x, tmp_path / "seen"), expected)
            assert three.replicas()[0].state == "dead"
            assert three.stats().respawns == before.respawns
        three.grow()
    after = three.stats()
    grown = after.since(before)
    assert grown.deaths == grown.respawns == 1  # its chunk may not have been sent any more
    (line,) = [r.getMessage() for r in caplog.records if "died" in r.getMessage()]
    parts = "replica 0 for device cpu", f"pid {lost.pid}", lost.node[:8], "in forward", "run again"
    assert all(part in line for part in parts), line
    assert "died in forward" in str(grown)
    assert [replica.calls for replica in grown.replicas] == [0, 4, 2]
    model(x)
    assert three.stats().since(after).replicas[0].calls == 1


CHANGES: dict[str, Callable[[Any, Tensor], object]] = {
    "parameter 'weight'": lambda net, x: net.weight.mul_(2),
    "requires_grad": lambda net, x: net.bias.requires_grad_(False),
    "behind its version": lambda net, x: net.weight.data.numpy().fill(2),
    "attribute": lambda net, x: net.eval(),
    "arguments": lambda net, x: x.zero_(),
}
SHORT = "parameter 'weight'", "requires_grad"


@pytest.mark.parametrize(
    "how", [how if how in SHORT else pytest.param(how, marks=pytest.mark.long) for how in CHANGES]
)
def test_a_graph_of_another_state_is_not_made(how: str, killable: Executor) -> None:
    """A named error; no gradient is left, and what the graph needs not is not minded."""
    model = DataParallel(nn.Linear(4, 2), executor=killable)
    x = torch.randn(4, 4)
    loss = model(x).sum()
    kill(killable, 1)
    with torch.no_grad():
        CHANGES[how](model.module, x)
    words = how if how != "behind its version" else "parameter 'weight'"
    error = raised(lambda: loss.backward(retain_graph=True))
    assert isinstance(error, StateChanged) and isinstance(error, GraphLost), error
    assert words in str(error) and "run forward again" in str(error)
    assert model.module.weight.grad is None
    model(x).sum().backward()
    assert model.module.weight.grad is not None


def spoil(net: Any, x: Tensor, spoils: bool = False) -> Tensor:
    """Warns; writes to a large sparse tensor, which nothing but a message can bring back."""
    warnings.warn("ran", stacklevel=1)
    if spoils:
        net.large.mul_(2.0)
    out: Tensor = net.layer(x)
    return out


def test_a_graph_is_made_again_after_a_validation(killable: Executor) -> None:
    """By a replica that gets the contents it lacks; what ran twice has warned and counts once."""
    net = Apply(spoil, layer=nn.Linear(4, 2), large=torch.eye(600).to_sparse())
    model = DataParallel(net, executor=killable)
    with pytest.warns(UserWarning, match="ran") as caught:
        loss = model(torch.ones(4, 4)).sum()
        net.eval()
        assert len([*model.map([(torch.ones(4, 4), True)] * 2)]) == 2
        net.train()
        said, rows = len(caught), [one.rows for one in killable.stats().replicas]
        kill(killable, 1)
        loss.backward()
    assert len(caught) == said and [one.rows for one in killable.stats().replicas] == rows
    assert torch.equal(net.layer.weight.grad, torch.full((2, 4), 4.0))


def poison(_net: nn.Module, x: Tensor) -> Tensor:
    """Ends every process that runs chunk 1."""
    if int(x[0]) == 1:
        os._exit(3)
    return x


@pytest.mark.long
def test_a_chunk_that_ends_whoever_runs_it(
    killable: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Is given up after a few, with pauses between, and an error that says so."""
    monkeypatch.setattr(replica_set, "_PAUSES", (0.01, 0.04))
    model = DataParallel(Apply(poison), executor=killable)
    text = r"^6 replicas died of chunk 1 in forward.* .*ends its process"
    with pytest.raises(ReplicaDied, match=text):
        model(torch.arange(2.0))
    assert "2 replicas ended before they answered; the next starts in 0.04 s" in caplog.text
    assert model(torch.tensor([0.0, 2.0])).tolist() == [0.0, 2.0]


def stops(_net: nn.Module, x: Tensor, folder: Path) -> Tensor:
    """Its process is stopped, once for each file."""
    for path in folder.iterdir():
        if int(x[0]) == 1 and not path.name.startswith("pid"):
            path.unlink()
            (folder / f"pid {os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait()  # the signal may find another thread first
    return x


@pytest.mark.long
def test_a_chunk_that_hangs_whoever_runs_it(tmp_path: Path) -> None:
    """Two of its replicas count as dead and are ended; then the call raises."""
    with Executor(TWO) as executor:
        model = DataParallel(Apply(stops), executor=executor)
        model(torch.tensor([0.0, 2.0]), tmp_path)
        for number in range(2):
            (tmp_path / f"stop {number}").touch()
        what = r"^2 replicas died of chunk .*: no answer within 3 s.*call_timeout"
        # Only calls of the chunk have a limit: others may take their time on a busy machine.
        with (
            limited(executor, 3.0, lambda call: call.terms.chunk == 1),
            pytest.raises(ReplicaDied, match=what),
        ):
            model(torch.arange(2.0), tmp_path)
        pids = [int(path.name[4:]) for path in tmp_path.iterdir()]
        assert len(pids) == 2 and all(map(ended, pids))
        assert model(torch.tensor([0.0, 2.0]), tmp_path).tolist() == [0.0, 2.0]


@pytest.mark.long
def test_ctrl_c_while_everybody_is_dead(killable: Executor) -> None:
    """A call that waits for a new replica is left at once; the next one is right."""
    model = DataParallel(nn.Linear(4, 2), executor=killable)
    x = torch.ones(4, 4)
    expected = model(x)
    kill(killable, 0, 1)
    # Only now it waits: before, Ctrl-C could come in a finalizer, where Python drops it.
    slots = killable.replica_set.slots.values()

    def press() -> None:
        for _ in range(30_000):  # a later test is not to be left
            if all(slot.successor is not None for slot in slots):
                os.kill(os.getpid(), signal.SIGINT)
                break
            time.sleep(0.002)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    with forked.held():
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert [info.state for info in killable.replicas()] == ["dead", "dead"]  # it did not wait
        thread.join()
    assert torch.equal(model(x), expected)
