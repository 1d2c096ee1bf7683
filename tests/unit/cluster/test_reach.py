"""Replicas that cannot be called directly, or that cannot share memory: calls go through Ray,
and are right.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from mortal import Mortal, arm, armed, rows
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, Options, PlacementError, cluster
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.replica import server
from raydp_parallel.transport import direct_connection, links, message_bytes

pytestmark = pytest.mark.usefixtures("cluster")
TWO = ["cpu", "cpu"]


class Wide(nn.Module):
    """Weights large enough to lie in shared memory, small ones, a buffer that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(6, 6000),
            nn.BatchNorm1d(6000),
            nn.Linear(6000, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.dropout(self.norm(self.first(x)), 0.3, self.training))


def train(
    executor: Executor, folder: Path, before: dict[int, Callable[[], object]] | None = None
) -> list[Tensor]:
    """Three steps, with an edit that moves no version; losses and the final state."""
    torch.manual_seed(5)
    model = DataParallel(Mortal(Wide(), folder), executor=executor)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for number in range(3):
        (before or {}).get(number, int)()
        loss = model(rows(len(executor.device_ids), number)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.module.body.first.weight.data.mul_(1.01)
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values())]


def expected(chunks: int, folder: Path) -> list[Tensor]:
    """What comes of it in one process."""
    with Executor(["cpu"] * chunks, options=Options(in_process=True, threads=1)) as executor:
        return train(executor, folder)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """To the bit."""
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def refuse(monkeypatch: pytest.MonkeyPatch, error: OSError, which: Collection[int]) -> list[str]:
    """Let the lines with these numbers fail; the addresses that were called."""
    called: list[str] = []

    def open_line(address: str, *arguments: Any) -> direct_connection.Connection:
        called.append(address)
        if len(called) - 1 in which:
            raise error
        return direct_connection.Connection(address, *arguments)

    monkeypatch.setattr(cluster.client, "Connection", open_line)
    return called


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "which", "tried"),
    [
        (direct_connection.LineCut("the other end hung up at once"), [1], 2),
        (TimeoutError("no greeting"), [0], 1),
    ],
    ids=["one is refused", "a greeting is late"],
)
def test_replicas_of_this_node_without_a_line(
    error: OSError,
    which: Collection[int],
    tried: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All its calls are Ray tasks then, and memory is shared all the same."""
    called = refuse(monkeypatch, error, which)
    with caplog.at_level(logging.WARNING, logger="raydp_parallel"), Executor(TWO) as executor:
        assert same(train(executor, tmp_path), expected(2, tmp_path))
        assert executor.stats().deaths == 0
    assert len(called) == tried
    assert not [record for record in caplog.records if "bytes are copied" in record.message]


@pytest.mark.long
def test_successors_without_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All die in a forward; the one that takes over is called through Ray, and sees the weights."""
    with Executor(TWO) as executor:
        called = refuse(
            monkeypatch, direct_connection.LineCut("the other end hung up at once"), range(9)
        )

        def die() -> None:
            arm(tmp_path, "forward 0", "forward 1")

        assert same(train(executor, tmp_path, {1: die}), expected(2, tmp_path))
        assert armed(tmp_path) == [] and called and executor.stats().deaths == 2
        assert all(slot.client.shares for slot in executor.replica_set.slots.values())


@pytest.mark.long
@pytest.mark.parametrize("lines", [True, False])
def test_successors_that_share_no_memory(
    lines: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All die in the midst of a forward that was made for replicas that see the weights; the one
    that takes over sees none of them, and gets copies.
    """
    stored, copied = cluster.client._stored, []

    def spy(packet: Any) -> Any:
        if isinstance(packet, links.Exposed):
            copied.append(packet)
        return stored(packet)

    monkeypatch.setattr(cluster.client, "_stored", spy)
    with Executor(TWO) as executor:
        assert all(slot.client.shares for slot in executor.slots(TWO))

        def die() -> None:
            arm(tmp_path, "forward 0", "forward 1")
            monkeypatch.setattr(cluster.client, "shows", lambda *_: False)
            if not lines:
                refuse(monkeypatch, direct_connection.LineCut("the other end hung up"), range(9))

        assert same(train(executor, tmp_path, {0: die}), expected(2, tmp_path))
        assert armed(tmp_path) == [] and copied and executor.stats().deaths == 2
        executor.grow(float("inf"))  # one of the two may still be on its way
        for slot in executor.slots(TWO):
            assert not slot.client.shares and (slot.client.line is not None) is lines


@pytest.mark.long
def test_memory_that_a_filter_of_system_calls_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container: what is sent is copied; a replica with a filter that refuses says so."""

    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    probe, shown = message_bytes.sample(Arena())
    monkeypatch.setattr(os, "memfd_create", refused)
    assert (
        server.ReplicaServer("cpu", links.link_for("auto")).share(probe.descriptor, shown) is None
    )
    with Executor(TWO) as executor:
        assert same(train(executor, tmp_path), expected(2, tmp_path))
    with pytest.raises(PlacementError, match="link='shared'"):
        Executor(TWO, options=Options(link="shared"))
