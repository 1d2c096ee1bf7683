"""Twenty steps of training a real architecture: losses, gradients, weights and buffers are
upstream's, step by step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from harness import tiny_gpt2
from torch import Tensor, nn
from torch.nn import functional as F

import raydp_parallel
from raydp_parallel import Options

pytestmark = pytest.mark.usefixtures("cluster", "one_thread")

STEPS = 20
ONE_THREAD = Options(threads=1)
"""How a sum is shared among threads decides its last bits."""

Batches = Callable[[int], tuple[Any, ...]]
Loss = Callable[..., Tensor]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The driver computes with one thread too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Run(NamedTuple):
    """What a training run did."""

    losses: list[Tensor]
    grads: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    output: Tensor
    """Of the trained model in eval mode."""


def ours(module: nn.Module, replicas: int) -> nn.Module:
    """Under our wrapper."""
    ids = ["cpu"] * replicas
    return raydp_parallel.DataParallel(copy.deepcopy(module), ids, options=ONE_THREAD)


def theirs(module: nn.Module, replicas: int) -> nn.Module:
    """Under upstream's."""
    return oracle.DataParallel(copy.deepcopy(module), list(range(replicas)))


def grads(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the gradients, by name without the wrapper's prefix."""
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of weights and buffers, by name without the wrapper's prefix."""
    return {name.removeprefix("module."): t.clone() for name, t in model.state_dict().items()}


def train(model: nn.Module, batches: Batches, loss: Loss, optimizer: torch.optim.Optimizer) -> Run:
    """The ordinary loop."""
    losses, history = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, *batches(step))
        value.backward()
        losses.append(value.detach())
        history.append(grads(model))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        output = loss(model, *batches(STEPS))
    return Run(losses, history, state(model), output)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay, so that parameters without a gradient would show."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def numbers(step: int) -> torch.Generator:
    """The same batches for all."""
    return torch.Generator().manual_seed(100 + step)


def identical(found: Run, expected: Run) -> None:
    """Bit by bit, every step."""
    for step, (one, other) in enumerate(zip(found.grads, expected.grads, strict=True)):
        assert one.keys() == other.keys()
        for name, grad in one.items():
            assert torch.equal(grad, other[name]), f"step {step}: {name}"
    assert all(map(torch.equal, found.losses, expected.losses))
    assert found.state.keys() == expected.state.keys()
    for name, tensor in found.state.items():
        assert torch.equal(tensor, expected.state[name]), name
    assert torch.equal(found.output, expected.output)


def texts(step: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask that pads some rows."""
    generator = numbers(step)
    mask = torch.ones(7, 12, dtype=torch.int64)
    mask[1::2, 9:] = 0
    return torch.randint(48, (7, 12), generator=generator), mask


def next_token(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Predict each next token; the loss is outside, from the gathered logits."""
    logits = model(input_ids=ids, attention_mask=mask)["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_inside(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The model's own loss, one per replica, averaged as the Trainer does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scalars become a vector
        return model(input_ids=ids, attention_mask=mask, labels=ids)["loss"].mean()


@pytest.mark.parametrize("loss", [next_token, loss_inside])
@pytest.mark.parametrize("replicas", [2, 3])
def test_tied_transformer(replicas, loss):
    """Embedding and head share one weight, in the master and in every replica."""
    net = tiny_gpt2()
    assert net.lm_head.weight is net.transformer.wte.weight
    found, expected = ours(net, replicas), theirs(net, replicas)
    run = train(found, texts, loss, adam(found))
    identical(run, train(expected, texts, loss, adam(expected)))
    assert found.module.lm_head.weight is found.module.transformer.wte.weight
    assert torch.equal(run.state["lm_head.weight"], run.state["transformer.wte.weight"])
