"""The trials of windows on a GPU, and of a group that uses NCCL, before anything depends on them.

They use the windows and the group themselves, and the operations of all later messages, at two
sizes, three times in the same memory, with other contents each time, behind work that keeps the GPU
busy.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel.devices.layout import Row
from raydp_parallel.errors import TransferError
from raydp_parallel.wire.channel import Channel
from raydp_parallel.wire.group import Exchange
from raydp_parallel.wire.messages import Answer

SIZES = [1 << 20, 64 << 20]
_ROUNDS = 3
_PRODUCTS = 50
_PATIENCE = 10.0
"""Seconds for each size."""


class Trial(NamedTuple):
    """A request to send tensors back, each bit turned; without any it ends the trial."""

    tensors: list[Tensor]


def try_ipc(channel: Channel, device: torch.device) -> None:
    """Let a channel use a GPU's memory from now on, if that works.

    Raises:
        Exception: It does not: the other process cannot be used any more.
    """
    channel.ipc = device
    for size in SIZES:
        deadline, row = time.monotonic() + _PATIENCE, torch.arange(size // 8, device=device)
        for n in range(_ROUNDS):
            # Not random: the program's own random numbers must not depend on a trial.
            sent = _late(_numbers(row, (n,)))
            channel.send(Trial([sent]))
            answer = channel.receive(deadline - time.monotonic(), device)
            if answer.failure is not None:
                raise TransferError(f"the replica cannot use them: {answer.failure.text}")
            if not torch.equal(answer.rows[0][0], ~sent):
                raise TransferError("other bytes arrived than were sent")
    channel.drop_windows()  # they were larger than the next messages may be
    channel.send(Trial([]))
    channel.receive(_PATIENCE)


def answer(channel: Channel, trial: Trial, device: torch.device) -> Answer:
    """Make the answer to a trial, in the replica."""
    channel.ipc = device
    if not trial.tensors:
        channel.drop_windows()
    return Answer(rows=(Row([_late(~t) for t in trial.tensors]),))


def try_group(exchange: Exchange, device: torch.device) -> None:
    """Let all members of a group do each operation, in the members.

    Raises:
        TransferError: Other bytes arrived than were sent, or in another order.
    """
    own, everyone = exchange.rank, range(exchange.size)
    for size in SIZES:
        row = torch.arange(size // 8 // exchange.size, device=device)
        for n in range(_ROUNDS):
            sent = _numbers(row, *[(n, own, to) for to in everyone])
            run = _late(sent * (own == exchange.root))
            exchange.spread(run)
            totals = _late(sent).view(-1)
            exchange.add([totals], everyone)
            sums = torch.zeros_like(totals)
            for by in everyone:
                sums += _numbers(row, *[(n, by, to) for to in everyone]).view(-1)
            found = [
                (run, _numbers(row, *[(n, exchange.root, to) for to in everyone])),
                (exchange.swap(_late(sent)), _numbers(row, *[(n, by, own) for by in everyone])),
                (totals, sums),
            ]
            for got, expected in found:
                if not torch.equal(got, expected):
                    raise TransferError("other numbers arrived than were sent, or in other places")


def _numbers(row: Tensor, *keys: tuple[int, ...]) -> Tensor:
    """Make rows of numbers that differ for each key, and are the same on every kind of GPU."""
    rows = [row] * len(keys)
    for i, key in enumerate(keys):
        for k in key:
            rows[i] = (rows[i] + k + 1) * 6364136223846793005
    return torch.stack(rows)


def _late(t: Tensor) -> Tensor:
    """Give the same values, once a GPU has computed for some milliseconds."""
    busy = torch.zeros(1024, 1024, device=t.device)
    for _ in range(_PRODUCTS):
        busy = busy @ busy
    return t + busy[0, 0].to(t.dtype)
