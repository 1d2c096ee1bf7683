"""Parity of training: each case is compared step by step with the plain module and, on GPUs, with
torch's own wrapper.

In double precision, so that a difference is an error and not rounding that training has amplified.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydp_parallel.check import nets
from raydp_parallel.check.here import Here, exact
from raydp_parallel.check.table import Row, RowResult

STEPS = 20
TOLERANCE = 1e-9
"""The largest difference, as a part of the norm: only the order of sums may differ."""


class TrainingCase(NamedTuple):
    """What is trained.

    Attributes:
        make: Makes the net.
        batch: Makes the batch of a step, on the CPU.
        loss: The loss of a net, wrapped or not, for a batch.
        splits: Whether the plain module computes the same from a whole batch as from its chunks;
            batch norm does not.
        optimizer: Makes the optimizer.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    splits: bool = True
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda net: torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01
    )


Run = list[list[Tensor]]
"""What a training run did: for each step the loss and the gradients; last the state."""


def numbers(step: int) -> torch.Generator:
    """The generator of a step: all runs get the same batches."""
    return torch.Generator().manual_seed(100 + step)


def rows(step: int) -> tuple[Tensor, Tensor]:
    """Batches of different sizes: 30, 30, 10, as the end of an epoch."""
    generator, count = numbers(step), (30, 30, 10)[step % 3]
    x = torch.randn(count, 8, generator=generator)
    return x, torch.randint(3, (count,), generator=generator)


def images(step: int) -> tuple[Tensor, Tensor]:
    """Small images."""
    generator = numbers(step)
    x = torch.randn(11, 3, 8, 8, generator=generator)
    return x, torch.randint(4, (11,), generator=generator)


def sentences(step: int) -> tuple[Tensor, Tensor]:
    """Word ids, and a tag for each word."""
    generator = numbers(step)
    ids = torch.randint(20, (9, 7), generator=generator)
    return ids, torch.randint(4, (63,), generator=generator)


def texts(step: int) -> tuple[Tensor, Tensor]:
    """Words, and the words that follow."""
    ids = torch.randint(48, (8, 13), generator=numbers(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def classify(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy outside of the net, so that its outputs are sent to the driver."""
    return F.cross_entropy(net(x), y)


def next_word(net: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """The same for texts."""
    return F.cross_entropy(net(ids).flatten(0, 1), targets.flatten())


def inside(net: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """The net's own loss, one per row."""
    loss: Tensor = net(ids, targets).mean()
    return loss


def accumulated(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Two backwards before the step, the second by the caller, with clipped gradients."""
    (classify(net, x, y) / 2).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    second: Tensor = classify(net, x.flip(0), y.flip(0)) / 2
    return second


def penalized(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy with a penalty on the gradient: second order."""
    x = x.detach().requires_grad_()
    loss = classify(net, x, y)
    (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    steep: Tensor = (grad.norm(dim=1) - 1).square().mean()
    return loss + steep


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    """AdamW with weight decay, so that parameters without a gradient would differ."""
    return torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-3)


def train(net: nn.Module, case: TrainingCase, steps: int, device: torch.device) -> Run:
    """Train a net in the usual loop."""
    optimizer = case.optimizer(net)
    run: Run = []
    for step in range(steps):
        batch = [
            t.to(device, torch.float64 if t.is_floating_point() else None) for t in case.batch(step)
        ]
        optimizer.zero_grad()
        loss = case.loss(net, *batch)
        loss.backward()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        run.append([loss.detach(), *grads])
        optimizer.step()
    run.append([t.clone() for t in net.state_dict().values()])
    return run


def difference(run: Run, expected: Run) -> float:
    """The largest difference of any step, as a part of the norm of what is compared."""
    worst = 0.0
    for found, wanted in zip(run, expected, strict=True):
        if len(found) != len(wanted):
            raise ValueError(f"{len(found) - 1} gradients, expected {len(wanted) - 1}")
        scale = max(1e-30, max(float(t.double().norm()) for t in wanted))
        gaps = [
            float((one.double() - other.double()).norm())
            for one, other in zip(found, wanted, strict=True)
        ]
        # max() would pass over a NaN.
        worst = max([worst, *(gap / scale if gap == gap else float("inf") for gap in gaps)])
    return worst


def check(case: TrainingCase, here: Here) -> RowResult:
    """Train copies of a net in each way that this machine allows, and compare them."""
    steps = here.rounds(STEPS)
    torch.manual_seed(0)
    made = case.make().double().to(here.device)
    with exact():
        plain = train(copy.deepcopy(made), case, steps, here.device)
        runs = {}
        for ids in (here.one, here.several):
            model = here.ours(copy.deepcopy(made), ids)
            name = f"{len(ids)} chunk{'s' * (len(ids) > 1)}"
            runs[name] = train(model, case, steps, here.device)
        pairs = [("plain, 1 chunk", runs["1 chunk"], plain)]
        several = next(name for name in runs if name != "1 chunk")
        if case.splits:
            pairs.append((f"plain, {several}", runs[several], plain))
        if here.gpus:
            for name, ids in (("1 chunk", here.one), (several, here.several)):
                theirs = train(here.upstreams(copy.deepcopy(made), ids), case, steps, here.device)
                pairs.append((f"nn.DataParallel, {name}", runs[name], theirs))
    found = {name: difference(run, expected) for name, run, expected in pairs}
    text = "; ".join(
        f"{name}: {'same bits' if not gap else f'{gap:.0e}'}" for name, gap in found.items()
    )
    return RowResult(f"{steps} steps, {text}", found, max(found.values()) <= TOLERANCE)


def gan(here: Here) -> RowResult:
    """Two wrapped nets on the same replicas, the second after the first, with second order."""
    steps = here.rounds(STEPS)
    torch.manual_seed(0)
    made = [net.double().to(here.device) for net in (nets.generator(), nets.critic())]

    def pair(wrap: Callable[[nn.Module], nn.Module]) -> Run:
        nets_ = [wrap(copy.deepcopy(net)) for net in made]
        return _train_gan(*nets_, steps=steps, device=here.device)

    with exact():
        plain = pair(lambda net: net)
        one = pair(lambda net: here.ours(net, here.one))
        found = {"plain, 1 chunk": difference(one, plain)}
        if here.gpus:
            ours = pair(lambda net: here.ours(net, here.several))
            theirs = pair(lambda net: here.upstreams(net, here.several))
            found[f"nn.DataParallel, {len(here.several)} chunks"] = difference(ours, theirs)
    text = "; ".join(
        f"{name}: {'same bits' if not gap else f'{gap:.0e}'}" for name, gap in found.items()
    )
    return RowResult(f"{steps} steps, {text}", found, max(found.values()) <= TOLERANCE)


def _train_gan(*nets_: nn.Module, steps: int, device: torch.device) -> Run:
    generate, critic = nets_
    by_critic, by_generator = (
        torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5) for net in (critic, generate)
    )
    run: Run = []
    for step in range(steps):
        random = numbers(step)
        real = torch.randn(10, 6, generator=random).double().to(device) + 2
        noise = torch.randn(10, 4, generator=random).double().to(device)
        weight = torch.rand(10, 1, generator=random).double().to(device)
        by_critic.zero_grad()
        with torch.no_grad():
            fake = generate(noise)
        between = (weight * real + (1 - weight) * fake).requires_grad_()
        (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = (
            critic(fake).mean() - critic(real).mean() + 10 * (grad.norm(dim=1) - 1).square().mean()
        )
        loss.backward()
        by_critic.step()
        by_generator.zero_grad()
        score = -critic(generate(noise)).mean()
        score.backward()
        by_generator.step()
        state = [t.clone() for net in (generate, critic) for t in net.state_dict().values()]
        run.append([loss.detach(), score.detach(), *state])
    return run


def channels_last() -> nn.Module:
    """The residual net with weights in the channels_last format."""
    net = nets.residual()
    for p in net.parameters():
        if p.dim() == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return net


CASES = {
    "perceptron, SGD": TrainingCase(nets.perceptron, rows, classify),
    "perceptron, AdamW": TrainingCase(nets.perceptron, rows, classify, optimizer=adamw),
    "perceptron, accumulated and clipped gradients": TrainingCase(
        nets.perceptron, rows, accumulated
    ),
    "perceptron, gradient penalty": TrainingCase(
        lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)), rows, penalized
    ),
    "residual net with batch norm": TrainingCase(nets.residual, images, classify, splits=False),
    "residual net, channels_last": TrainingCase(channels_last, images, classify, splits=False),
    "bidirectional LSTM": TrainingCase(nets.Tagger, sentences, classify),
    "tied transformer, loss outside": TrainingCase(nets.gpt, texts, next_word),
    "tied transformer, loss inside": TrainingCase(nets.gpt, texts, inside),
}


def beside_upstream(here: Here) -> RowResult:
    """States that the rows above were compared with torch's own wrapper."""
    return RowResult(f"in each row of training, with device_ids {here.one} and {here.several}")


def on_several(here: Here) -> RowResult:
    """States that the rows above had a replica on each of several GPUs."""
    return RowResult(f"in each row of training, on {here.gpus} GPUs")


ROWS = (
    *(Row("training", name, functools.partial(check, case)) for name, case in CASES.items()),
    Row("training", "two nets of a GAN, second order", gan),
    Row("training", "beside nn.DataParallel", beside_upstream, gpus=1),
    Row("training", "a replica for each of several GPUs", on_several, gpus=2),
)
