"""Row B10: what a checkpoint inside the module finds when it runs again in backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import assert_same_grads, assert_same_state, made_of, trio
from random_nets import Checkpointed
from torch import Tensor, nn

from raydp_parallel import DataParallel


@made_of(layer=(3, 3), scale=nn.Buffer(torch.ones(3)))
def drifting(net: Any, x: Tensor) -> Tensor:
    """Scales by a buffer that each call moves, and an attribute: gradients tell what it found."""
    net.scale.mul_(0.5).add_(x.detach().mean(0).abs() + 0.1)
    return net.layer(x).tanh() * net.scale.clone() * net.gain  # type: ignore[no-any-return]


def tell(net: Any, inputs: tuple[Tensor]) -> None:
    net.block.gain = inputs[0].detach().mean().item()


def steps(model: nn.Module, order: tuple[int, ...]) -> list[Tensor]:
    """Forwards, and then their backwards in some order; the gradients of what went in."""
    numbers = torch.Generator().manual_seed(1)
    inputs = [torch.randn(6, 3, generator=numbers).requires_grad_() for _ in order]
    losses = [model(x).square().sum() for x in inputs]
    for i in order:
        losses[i].backward()
    return [x.grad for x in inputs]  # type: ignore[misc]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 2, 0)], ids=str)
def test_B10_in_a_replica_a_block_finds_the_buffers_of_its_own_forward(
    reentrant: bool, order: tuple[int, ...]
) -> None:
    """Those that its forward left, also in chunk 0, where upstream's are those of today."""
    net = Checkpointed(drifting(), reentrant)
    net.register_forward_pre_hook(tell)
    found = steps(DataParallel(copy.deepcopy(net), ["cpu", "cpu"]), order)
    numbers = torch.Generator().manual_seed(1)
    for grad in found:
        x = torch.randn(6, 3, generator=numbers).requires_grad_()
        chunks = x.chunk(2)
        alone = [copy.deepcopy(net) for _ in chunks]
        losses = [one(part).square().sum() for one, part in zip(alone, chunks, strict=True)]
        net.load_state_dict(alone[0].state_dict())
        sum(losses).backward()
        torch.testing.assert_close(grad, x.grad)


@made_of(layer=(3, 3), scale=2.0)
def moody(net: Any, x: Tensor) -> Tensor:
    """Scales by an attribute, and otherwise in eval mode, so that gradients tell them."""
    return net.layer(x).tanh() * (net.scale if net.training else 5.0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("devices", [2, 3])
def test_B10_a_validation_batch_between_a_forward_and_its_backward(
    devices: int, reentrant: bool
) -> None:
    """The block runs again in the mode and with the attributes of its own forward."""

    def use(model: Any) -> list[Tensor]:
        numbers = torch.Generator().manual_seed(1)
        x = torch.randn(6, 3, generator=numbers).requires_grad_()
        loss = model(x).square().sum()
        model.eval()
        other = model(torch.randn(6, 3, generator=numbers))
        model.train()
        model.module.block.scale += 1.0
        loss.backward()
        return [x.grad, other.detach(), model(x).detach()]  # type: ignore[list-item]

    ours, theirs, _ = trio(Checkpointed(moody(), reentrant), devices)
    for _ in range(2):
        torch.testing.assert_close(use(ours), use(theirs))
        assert_same_grads(ours, theirs)
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_B10_what_an_older_checkpoint_writes_replaces_nothing(reentrant: bool) -> None:
    """Neither a later forward's writes nor an edit; a forward of now is written each time."""
    norm, x = nn.BatchNorm1d(3), torch.randn(4, 3, requires_grad=True)
    model = DataParallel(Checkpointed(norm, reentrant), ["cpu", "cpu"])
    first, _ = model(x).sum(), model(2 * x)
    norm.running_mean.add_(7)
    before = [t.clone() for t in norm.buffers()]
    first.backward()
    assert all(map(torch.equal, before, norm.buffers()))
    last = model(x).square().sum()
    for count in (4, 5):
        last.backward(retain_graph=True)
        assert norm.num_batches_tracked.item() == count


def shrinking(net: Any, x: Tensor) -> Tensor:
    """Shrinks its weights by ``.data`` where they are too large, and uses one of them."""
    for layer in (net.layer, net.other):
        layer.weight.data.copy_(layer.weight.data.clamp(-1, 1))
    return net.layer(x)[:, :3]  # type: ignore[no-any-return]


def total(net: nn.Module) -> Tensor:
    """The sum of all weights."""
    return torch.stack([p.detach().sum() for p in net.parameters()]).sum()


@pytest.mark.parametrize("width", [3, 20_000])
def test_R6_a_weight_that_was_written_to_is_the_master_s_in_the_next_forward(width: int) -> None:
    """In every replica, sent or mapped, and also if what was written was there before."""
    made = made_of(layer=(3, width), other=(3, width))(shrinking)
    net = Checkpointed(made(), reentrant=False)
    model, x = DataParallel(net, ["cpu", "cpu"]), torch.randn(4, 3)
    for edited in (0, 0, 2):
        model(x).sum().backward()
        [*net.parameters()][edited].data.add_(1)
        before = total(net)
        found = model.run(lambda net, x: total(net) + 0 * x.sum(), x)
        torch.testing.assert_close(found, before.repeat(2))
