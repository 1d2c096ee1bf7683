"""Random training programs, each a function of its seed, to be run under two wrappers and compared.

Nothing is drawn from torch's default generator but in `made`, which seeds it: the wrappers use it
differently.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 4

Wrap = Callable[[nn.Module, int], nn.Module]
Seen = list[tuple[str, Tensor]]

# A gradient that is zero but for rounding, as of a bias in front of batch norm, stays small beside
# this.
_EPS = 1e-5

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.02, "eps": _EPS},
    "AdamW": {"lr": 0.02, "eps": _EPS},
    "Adagrad": {"lr": 0.05, "eps": _EPS},
    "RMSprop": {"lr": 0.01, "eps": _EPS},
    "Adamax": {"lr": 0.02, "eps": _EPS},
    "NAdam": {"lr": 0.02, "eps": _EPS},
    "RAdam": {"lr": 0.02, "eps": _EPS},
    "ASGD": {"lr": 0.05},
    "Adadelta": {"lr": 0.5, "eps": _EPS},
}


class Residual(nn.Module):
    """Adds what its block gives."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Branches(nn.Module):
    """A list and a dict of blocks; their outputs are added."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.many, self.named = nn.ModuleList(blocks[1:]), nn.ModuleDict({"first": blocks[0]})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.named["first"](x)
        for block in self.many:
            out = out + block(x)
        return out


class Twice(nn.Module):
    """Uses one block two times; or ties the weights of two layers."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.two.weight = self.one.weight
        else:
            self.two = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh())


class Checkpointed(nn.Module):
    """Computes its block again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class Clipped(nn.Module):
    """A hook on the tensor between its layers, that is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(-0.2, 0.2) + grad.pow(2))
        return self.two(hidden)


class Running(nn.Module):
    """A buffer and a counter that forward writes to; the buffer also through ``.data``."""

    mean: Tensor
    calls: Tensor

    def __init__(self, raw: bool) -> None:
        super().__init__()
        self.raw = raw
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            now = x.detach().mean(0)
            if self.raw:
                self.mean.data.mul_(0.5).add_(0.5 * now)
            else:
                self.mean.mul_(0.5).add_(0.5 * now)
            self.calls += 1
        return x - self.mean.clone()


class Edits(nn.Module):
    """Edits its weight by ``.data``: keeps it small, in place or with other memory, or lets it
    decay.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        if self.how == "decay":
            weight.data.mul_(0.95)
        elif self.how == "renew":
            weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.5)
        else:
            weight.data.copy_(torch.renorm(weight.data, p=2, dim=0, maxnorm=0.5))
        return self.layer(x)


def scale_output(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """A forward hook."""
    return output * 1.25


def shift_input(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """A hook before forward."""
    return (args[0] + 0.5,)


def squash_grad(_module: nn.Module, grads: Any, _outputs: Any) -> Any:
    """A full backward hook."""
    return tuple(None if grad is None else grad * 0.5 for grad in grads)


def normed(draw: random.Random) -> nn.Module:
    """A layer with a weight that is computed, in the old way or the new."""
    how = draw.choice(("weight", "old weight", "spectral", "old spectral"))
    wrap: dict[str, Callable[[nn.Module], Any]] = {
        "weight": parametrizations.weight_norm,
        "old weight": nn.utils.weight_norm,
        "spectral": parametrizations.spectral_norm,
        "old spectral": nn.utils.spectral_norm,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return wrap[how](nn.Linear(WIDTH, WIDTH))


def block(draw: random.Random, depth: int) -> nn.Module:
    """A module that keeps the width."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7),
        "activation": lambda: draw.choice((nn.Tanh, nn.Softplus, nn.GELU))(),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "batch norm": lambda: nn.BatchNorm1d(WIDTH),
        "twice": lambda: Twice(draw.random() < 0.5),
        "clipped": Clipped,
        "running": lambda: Running(draw.random() < 0.5),
        "computed": lambda: normed(draw),
        "edits": lambda: Edits(draw.choice(("decay", "renew", "bound"))),
    }
    deep: dict[str, Callable[[], nn.Module]] = {
        "sequence": lambda: nn.Sequential(*blocks()),
        "residual": lambda: Residual(block(draw, depth - 1)),
        "branches": lambda: Branches(blocks()),
        "checkpoint": lambda: Checkpointed(block(draw, depth - 1), draw.random() < 0.5),
    }

    def blocks() -> list[nn.Module]:
        return [block(draw, depth - 1) for _ in range(draw.randrange(1, 4))]

    names = (*kinds, *((*deep, "checkpoint") * 2 if depth else ()))
    found = (kinds | deep)[draw.choice(names)]()
    hook = draw.randrange(12)
    if hook == 0:
        found.register_forward_hook(scale_output)
    elif hook == 1:
        found.register_forward_pre_hook(shift_input)
    elif hook == 2:
        found.register_full_backward_hook(squash_grad)
    return found


def recomputes_buffers(net: nn.Module) -> bool:
    """Tell if a checkpoint finds buffers of its own forward, where upstream's first chunk finds the
    master's of today (row B10): two forwards before one backward show that.
    """
    return any(isinstance(m, Checkpointed) and [*m.buffers()] for m in net.modules())


def made(draw: random.Random, make: Callable[[], Any]) -> Any:
    """What draws from torch's generator, the same for both wrappers."""
    torch.manual_seed(draw.randrange(1 << 30))
    return make()


def edit(draw: random.Random, net: nn.Sequential, start: dict[str, Tensor]) -> tuple[str, bool]:
    """Change the module between two steps. Its name, and whether the optimizer has to be made
    again.
    """
    kind = draw.choice(
        ("freeze", "thaw", "swap", "mode", "load", "data", "no grad", "dtype", "nothing", "nothing")
    )
    parameters, children = [*net.parameters()], [*net]
    if kind == "freeze" and len(parameters) > 2:
        draw.choice(parameters[:-2]).requires_grad_(False)
    elif kind == "thaw":
        net.requires_grad_(True)
    elif kind == "swap":
        net[draw.randrange(len(children) - 1)] = made(draw, lambda: block(draw, 1)).to(
            parameters[-1].dtype
        )
        net[0].requires_grad_(True)
        return kind, True
    elif kind == "mode":
        net.train(not net.training)
    elif kind == "load" and start.keys() == net.state_dict().keys():
        net.load_state_dict(start)
    elif kind == "data":
        draw.choice(parameters).data.mul_(0.9)
    elif kind == "no grad":
        with torch.no_grad():
            draw.choice(parameters).add_(0.01)
    elif kind == "dtype":
        net.to(torch.float32 if parameters[-1].dtype is torch.float64 else torch.float64)
        return kind, True
    return kind, False


def run(seed: int, wrap: Wrap) -> Seen:
    """Everything that a program shows, under one of the wrappers: losses, gradients and state after
    each step.
    """
    draw = random.Random(seed)
    devices = draw.choice((2, 2, 2, 3))
    net: nn.Sequential = made(
        draw, lambda: nn.Sequential(*[block(draw, 3) for _ in range(draw.randrange(2, 5))])
    )
    net.append(made(draw, lambda: nn.Linear(WIDTH, 2))).double()
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    model = wrap(net, devices)
    name = draw.choice([*OPTIMIZERS])
    optimizer = getattr(torch.optim, name)(net.parameters(), **OPTIMIZERS[name])
    seen: Seen = []
    done = [f"{devices} devices, {name}"]
    for number in range(3):
        if number:
            kind, again = edit(draw, net, start)
            done.append(kind)
            if again:
                optimizer = getattr(torch.optim, name)(net.parameters(), **OPTIMIZERS[name])
        done.append(
            how := draw.choice(("plain", "plain", "twice", "penalty", "inputs", "evaluate"))
        )
        seen += [
            (f"{', '.join(done)}: {what}", tensor)
            for what, tensor in step(draw, how, net, model, optimizer)
        ]
    return seen


def step(
    draw: random.Random, how: str, net: nn.Module, model: nn.Module, optimizer: Any
) -> Iterator[tuple[str, Tensor]]:
    """One training step, or a forward without gradients."""
    rows, dtype = draw.choice((6, 8, 9, 11)), next(iter(net.parameters())).dtype
    x = made(draw, lambda: torch.randn(rows, WIDTH, dtype=torch.float64)).to(dtype)
    if how == "evaluate":
        with torch.no_grad():
            yield "output", model(x)
        return
    reentrant = any(isinstance(m, Checkpointed) and m.reentrant for m in net.modules())
    x.requires_grad_(how in ("inputs", "penalty") or reentrant)
    optimizer.zero_grad()
    out = model(x)
    loss = out.square().mean()
    # A graph keeps the weight that its forward used, where upstream's first chunk finds the next
    # one's (row B11).
    decays = any(isinstance(m, Edits) and m.how == "decay" for m in net.modules())
    if how == "twice" and not decays and not recomputes_buffers(net):
        loss = loss + model(x * 0.5).sin().mean()
    if how == "penalty" and not reentrant:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
    yield "output", out.detach().clone()
    loss.backward()
    yield "loss", loss.detach()
    if x.grad is not None:
        yield "gradient of x", x.grad
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad.clone()
    optimizer.step()
    for name, tensor in net.state_dict().items():
        yield name, tensor.clone()
