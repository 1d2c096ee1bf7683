"""`DataParallel.no_sync` with what else keeps bytes out of the driver: losses in the replicas,
batches by reference, and optimizers in the replicas.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal

import pytest
import ray
import torch
from accumulating import assert_alike, batch, lie, small
from harness import optimizer_of
from torch import Tensor, nn

from raydp_parallel import ChunkRefs, DataParallel, Executor, Options
from raydp_parallel.calls.remote_gradients import RemoteGradient


def targets(seed: int, size: int = 6) -> Tensor:
    """What a batch's outputs are to be."""
    return torch.randn(
        size, 2, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64
    )


def by_reference(tensor: Tensor) -> ChunkRefs:
    """A batch of which the chunks lie in Ray's object store."""
    return ChunkRefs([ray.put(part.clone()) for part in tensor.chunk(2)])


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("size", [6, 5])
def test_X7_losses_in_the_replicas(two: Executor, outer: bool, size: int) -> None:
    """The mean over the batch in each backward, of uneven chunks too; the block of either wrapper
    holds.
    """
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two)
    criterion = nn.MSELoss()
    lossy = model.with_loss(criterion)
    for number in range(4):
        x, y, hold = batch(number, size), targets(number, size), number < 3
        block = (model if outer else lossy).no_sync() if hold else contextlib.nullcontext()
        with block:
            loss = lossy(x, y) / 4
        loss.backward()
        assert lie(net) == [hold] * 4
        (criterion(plain(x), y) / 4).backward()
    assert_alike(net, plain)


@pytest.mark.long
def test_X7_batches_by_reference(killable: Executor) -> None:
    """Another replica gets the objects again where one died, though the program let go of them."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=killable)
    kept = []
    for number in range(4):
        refs = by_reference(batch(number))
        kept.append(refs)
        with model.no_sync() if number < 3 else contextlib.nullcontext():
            loss = model(refs).square().sum()
        if number == 2:
            kept.clear()
            os.kill(killable.replicas()[1].pid, signal.SIGKILL)
        loss.backward()
        plain(batch(number)).square().sum().backward()
    assert not any(lie(net))
    assert_alike(net, plain)


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.long)])
def test_X7_an_optimizer_a_loss_and_references_at_once(killable: Executor, dies: bool) -> None:
    """Nothing but losses passes through the driver, and gradients once per step."""
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    found = []
    for remote in (False, True):
        torch.manual_seed(0)
        mine = copy.deepcopy(net)
        options = Options(buffers="mean")
        model = DataParallel(mine, executor=killable, options=options)
        lossy = model.with_loss(nn.MSELoss())
        optimizer = optimizer_of(model, remote, torch.optim.AdamW, lr=0.1)
        for number in range(9):
            hold = remote and number % 3 < 2
            x, y = batch(number), targets(number)
            with model.no_sync() if hold else contextlib.nullcontext():
                loss = lossy(by_reference(x), by_reference(y)) if remote else lossy(x, y)
            if remote and dies and number == 4:
                os.kill(killable.replicas()[0].pid, signal.SIGKILL)
            loss.backward()
            if hold:
                assert all(isinstance(p.grad, RemoteGradient) for p in mine.parameters())
            if number % 3 == 2:
                optimizer.clip_grad_norm_(1.0) if remote else nn.utils.clip_grad_norm_(
                    mine.parameters(), 1.0
                )
                optimizer.step()
                optimizer.zero_grad()
        found.append(copy.deepcopy(model.state_dict()))
        if remote:
            optimizer.close()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-9, atol=1e-9)
