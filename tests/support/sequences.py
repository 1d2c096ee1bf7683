"""Random sequences of what programs do with one wrapper, beside the plain module that does the
same.

A sequence is a seed, which chooses the net and the optimizer, and a list of steps. Each step has a
seed of its own, so that any other step can be left out.
"""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from harness import kill
from random_nets import (
    WIDTH,
    Checkpointed,
    Twice,
    block,
    made,
    scale_output,
    shift_input,
    squash_grad,
)
from torch import Tensor, nn
from torch.nn.functional import linear

KINDS = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad

Parts = Iterator[tuple[str, Tensor]]


class Step(NamedTuple):
    """One action. Only where it ends with a look are gradients and weights read."""

    action: str
    seed: int
    look: bool


class Seen(NamedTuple):
    """What a program shows. It is exact if both sides add the same numbers in the same order."""

    what: str
    value: Tensor
    exact: bool


class Lower(nn.Linear):
    """Computes in a lower precision where autocast asks for that."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            return linear(x.float(), self.weight.float(), self.bias.float()).double()
        return super().forward(x)


class Net(nn.Module):
    """A random net; ``fail`` lets chunks with a negative first number fail."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        first = Lower(width, width), nn.Tanh(), nn.Linear(width, WIDTH)
        self.body = nn.Sequential(*first, *[block(draw, 2) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)
        self.scale = 1.0

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        hidden = self.body(x)
        if fail and x[0, 0] < 0:
            raise LookupError("as told")
        return self.head(hidden) * self.scale

    def negative(self, x: Tensor) -> Tensor:
        return -self(x)

    def has(self, kind: type[nn.Module]) -> bool:
        return any(isinstance(part, kind) for part in self.modules())


def squared(net: nn.Module, x: Tensor) -> Tensor:
    """A function for `run`."""
    out: Tensor = net(x)
    return out.square()


class Plain(nn.Module):
    """Calls its module for each chunk, as a wrapper does: all begin with the same buffers, and only
    the first one's writes stay.
    """

    def __init__(self, module: nn.Module, devices: int) -> None:
        super().__init__()
        self.module, self.devices = module, devices

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.run(lambda module, x: module(x, **kwargs), x)

    def call(self, name: str, x: Tensor) -> Tensor:
        return self.run(lambda module, x: getattr(module, name)(x), x)

    def run(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        buffers, outs = [*self.module.buffers()], []
        before = after = [b.clone() for b in buffers]
        try:
            for number, chunk in enumerate(x.chunk(self.devices)):
                try:
                    outs.append(function(self.module, chunk))
                finally:
                    if not number:
                        after = [b.clone() for b in buffers]
                    _write(buffers, before)
        finally:
            _write(buffers, after)
        return torch.cat(outs)

    def map(self, batches: list[Tensor], split: bool) -> Iterator[Tensor]:
        with torch.no_grad():
            for x in batches:
                before = [b.clone() for b in self.module.buffers()]
                try:
                    yield self(x) if split else self.module(x)
                finally:
                    _write([*self.module.buffers()], before)

    def with_loss(self, criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, y: criterion(self(x), y)

    def optimizer(self, kind: Any, **keywords: Any) -> Any:
        return kind(self.parameters(), **keywords)


def _write(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # no graph of batch norm's is asked for its version


Wrap = Callable[[nn.Module, int], Any]


class Program:
    """One program: a net, its wrapper, an optimizer, and what it has kept."""

    def __init__(self, seed: int, inside: bool, wrap: Wrap) -> None:
        draw = random.Random(seed)
        self.inside, self.wrap = inside, wrap
        self.devices = draw.choice((1, 2, 2, 2, 2))
        self.width = draw.choice((3, 3, 96))  # those of 96 x 96 numbers lie in windows
        net: Net = made(draw, lambda: Net(draw, self.width))
        self.model: Any = wrap(net.double(), self.devices)
        self.exact = not net.has(Twice)
        self.kind, self.fused = draw.choice(KINDS), draw.random() < 0.7
        self.keywords = {"lr": 0.01, **({"fused": True} if self.fused else {})}
        self.keywords |= {"momentum": 0.9} if self.kind is torch.optim.SGD else {"eps": 1e-5}
        self.new_optimizer()
        self.saved: Any = None
        self.outs: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.views: list[Tensor] = []
        self.handles: list[Any] = []

    @property
    def net(self) -> Any:
        return self.model.module

    def new_optimizer(self) -> None:
        how = self.model.optimizer if self.inside else self._ordinary
        self.optimizer = how(self.kind, **self.keywords)

    def _ordinary(self, kind: Any, **keywords: Any) -> Any:
        return kind(self.model.parameters(), **keywords)

    def batch(self, draw: random.Random) -> Tensor:
        rows = draw.choice((1, 4, 5, 7, 8))
        return made(draw, lambda: torch.randn(rows, self.width, dtype=torch.float64))

    def backward(self, loss: Tensor, **how: Any) -> None:
        """Replicas add each chunk's gradients of several backwards before those of all chunks."""
        if self.inside and any(p.grad is not None for p in self.net.parameters()):
            self.exact = False
        loss.backward(**how)

    def parameter(self, draw: random.Random) -> Any:
        return draw.choice([*self.net.parameters()])

    def tensor(self, draw: random.Random) -> Tensor:
        buffers = [b for b in self.net.buffers() if b.is_floating_point()]
        return draw.choice([*self.net.parameters(), *buffers])

    def harmless(self) -> set[str]:
        """After these actions the backward of a kept graph is the same on both sides. A graph in a
        replica keeps small weights and buffers of its forward, where the plain module's may see
        those of today (row B11), and so may a checkpoint.
        """
        if self.net.has(Checkpointed):
            return {"keep", "kept"}
        return _HARMLESS if self.fused else _HARMLESS | {"train", "step"}

    def look(self, draw: random.Random) -> Parts:
        """Read everything, in any order."""
        params = [*self.net.named_parameters()]
        parts = [
            [(f"gradient of {name}", p.grad) for name, p in params if p.grad is not None],
            [*self.model.state_dict().items()] if draw.random() < 0.5 else params,
        ]
        for part in parts if draw.random() < 0.5 else parts[::-1]:
            yield from part


def loss_of(out: Tensor) -> Tensor:
    return (out - 1).square().mean()


# --- actions ---


def train(p: Program, draw: random.Random) -> Parts:
    zero(p, draw)
    for _ in range(draw.choice((1, 1, 2))):
        out = p.model(p.batch(draw))
        yield "output", out
        p.backward(loss_of(out))
    p.optimizer.step()


def accumulate(p: Program, draw: random.Random) -> Parts:
    x, how = p.batch(draw).requires_grad_(draw.random() < 0.5), draw.randrange(4)
    if how == 0:
        out = p.model.call("negative", x)
    elif how == 1:
        out = p.model.run(squared, x)
    else:
        out = (p.model if how == 2 else p.wrap(p.net, p.devices))(x)
    yield "output", out
    p.backward(loss_of(out))
    if x.grad is not None:
        yield "gradient of x", x.grad


def step(p: Program, draw: random.Random) -> None:
    p.optimizer.step()


def closure(p: Program, draw: random.Random) -> Parts:
    x = p.batch(draw)

    def again() -> Tensor:
        p.optimizer.zero_grad()
        loss = loss_of(p.model(x))
        p.backward(loss)
        return loss

    yield "loss", p.optimizer.step(again)


def evaluate(p: Program, draw: random.Random) -> Parts:
    with draw.choice((torch.no_grad, torch.inference_mode))():
        for _ in range(2):
            yield "output", p.model(p.batch(draw))


def map_batches(p: Program, draw: random.Random) -> Parts:
    batches = [p.batch(draw) for _ in range(3)]
    for out in p.model.map(batches, split=draw.random() < 0.3):
        yield "output", out


def with_loss(p: Program, draw: random.Random) -> Parts:
    p.exact = False  # a chunk's mean is weighted
    zero(p, draw)
    x = p.batch(draw)
    p.backward(loss := p.model.with_loss(nn.MSELoss())(x, x[:, :2]))
    yield "loss", loss
    p.optimizer.step()


def twice(p: Program, draw: random.Random) -> None:
    loss = loss_of(p.model(p.batch(draw)))
    p.backward(loss, retain_graph=True)
    for _ in range(draw.choice((1, 1, 2))):  # the third one fails
        p.backward(loss)


def two(p: Program, draw: random.Random) -> None:
    losses = [loss_of(p.model(p.batch(draw))) for _ in range(2)]
    draw.shuffle(losses)
    for loss in losses:
        p.backward(loss)


def penalty(p: Program, draw: random.Random) -> Parts:
    x = p.batch(draw).requires_grad_()
    loss = loss_of(p.model(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    yield "slope", slope
    p.exact = False  # two trips, of which each sums its chunks
    p.backward(loss + slope.square().sum())


def regularize(p: Program, draw: random.Random) -> None:
    loss = loss_of(p.model(p.batch(draw)))
    p.exact = False  # added to the chunks' sum here, and to a chunk there
    p.backward(loss + sum(w.square().sum() for w in p.net.parameters()))


def slopes(p: Program, draw: random.Random) -> Parts:
    wanted = [w for w in p.net.parameters() if w.requires_grad]
    for slope in torch.autograd.grad(loss_of(p.model(p.batch(draw))), wanted):
        yield "slope", slope


def autocast(p: Program, draw: random.Random) -> Parts:
    p.model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = p.model(p.batch(draw))
    yield "output", out
    p.backward(loss_of(out))


def failing(p: Program, draw: random.Random) -> Parts:
    try:
        yield "output", p.model(p.batch(draw), fail=True)
    except LookupError:
        yield "failed", torch.ones(())


def edit(p: Program, draw: random.Random) -> None:
    with torch.no_grad():
        p.tensor(draw).mul_(0.9)


def edit_data(p: Program, draw: random.Random) -> None:
    tensor, how = p.tensor(draw), draw.randrange(3)
    if how == 0:
        tensor.data.mul_(0.9)
    elif how == 1:
        tensor.data = tensor.data * 0.9
    else:
        array = tensor.detach().numpy()
        array *= 0.9


def freeze(p: Program, draw: random.Random) -> None:
    one = draw.choice((p.net, p.parameter(draw), p.parameter(draw), p.parameter(draw)))
    one.requires_grad_(draw.random() < 0.5)


def replace(p: Program, draw: random.Random) -> None:
    at = draw.choice((0, 3, 4, 5))
    layer = made(draw, lambda: block(draw, 1) if at else nn.Linear(p.width, p.width)).double()
    p.exact = p.exact and not p.net.has(Twice)
    p.net.body[at] = layer
    p.exact = p.exact and not p.net.has(Twice)
    how = draw.randrange(3)
    if how == 0:
        p.new_optimizer()
    elif how == 1 and [*layer.parameters()]:
        p.optimizer.add_param_group({"params": layer.parameters()})


def take_out(p: Program, draw: random.Random) -> Parts:
    at = draw.choice((0, 1, 3, 4, 5))
    layer, p.net.body[at] = p.net.body[at], nn.Identity()
    with torch.set_grad_enabled(draw.random() < 0.5):
        yield "output", p.model(p.batch(draw))
    p.net.body[at] = layer


def attribute(p: Program, draw: random.Random) -> None:
    p.net.scale = draw.choice((0.5, 1.0, 2.0))


def mode(p: Program, draw: random.Random) -> None:
    p.model.train(not p.net.training)


def hook(p: Program, draw: random.Random) -> None:
    layer, weight, how = draw.choice([*p.net.body]), p.parameter(draw), draw.randrange(5)
    if p.handles and draw.random() < 0.6:
        p.handles.pop().remove()
    elif how == 0:
        p.handles.append(layer.register_forward_hook(scale_output))
    elif how == 1:
        p.handles.append(layer.register_forward_pre_hook(shift_input))
    elif how == 2:
        p.handles.append(layer.register_full_backward_hook(squash_grad))
    elif how == 3 and weight.requires_grad:
        p.handles.append(weight.register_hook(lambda grad: grad * 0.5))
    elif weight.requires_grad:
        p.handles.append(weight.register_post_accumulate_grad_hook(_halve))


def _halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.5)


def save(p: Program, draw: random.Random) -> None:
    p.saved = io.BytesIO()
    torch.save((p.model.state_dict(), p.optimizer.state_dict()), p.saved)


def load(p: Program, draw: random.Random) -> None:
    if p.saved is not None:
        p.saved.seek(0)
        weights, state = torch.load(p.saved)
        p.model.load_state_dict(weights)
        if draw.random() < 0.5:
            p.optimizer.load_state_dict(state)


def deepcopy(p: Program, draw: random.Random) -> Parts:
    other = copy.deepcopy(p.model)
    yield "output of the copy", other(p.batch(draw))
    if draw.random() < 0.3:
        p.model = other
        p.new_optimizer()


def keep(p: Program, draw: random.Random) -> None:
    p.outs.append(p.model(p.batch(draw)))
    p.losses.append(loss_of(p.outs[-1]))


def kept(p: Program, draw: random.Random) -> Parts:
    while p.outs:
        yield "kept output", p.outs.pop()
    while p.losses:
        p.backward(p.losses.pop())


def drop(p: Program, draw: random.Random) -> None:
    p.outs.clear(), p.losses.clear(), p.views.clear()
    gc.collect()


def zero(p: Program, draw: random.Random) -> None:
    draw.choice((p.model, p.net, p.optimizer)).zero_grad(set_to_none=draw.random() < 0.6)


def clip(p: Program, draw: random.Random) -> Parts:
    params, how = [w for w in p.net.parameters() if w.grad is not None], draw.randrange(3)
    if how == 0 and params:
        torch.nn.utils.clip_grad_value_(params, 0.01)
    elif how == 1 and hasattr(p.optimizer, "clip_grad_norm_"):
        yield "norm", p.optimizer.clip_grad_norm_(0.1)
    else:
        own = [w for group in p.optimizer.param_groups for w in group["params"]]
        yield "norm", torch.nn.utils.clip_grad_norm_(own, 0.1)


def norm(p: Program, draw: random.Random) -> Parts:
    if hasattr(p.optimizer, "grad_norm"):
        yield "norm", p.optimizer.grad_norm()
    else:
        own = [w for group in p.optimizer.param_groups for w in group["params"]]
        grads = [w.grad for w in own if w.grad is not None]
        yield "norm", torch.nn.utils.get_total_norm(grads)


def death(p: Program, draw: random.Random) -> Parts:
    """Train, while a replica ends on the way, if it may. Whatever else only it had is dropped."""
    drop(p, draw)
    p.net.zero_grad()
    moment, victim = draw.randrange(3), draw.randrange(2)
    executor = getattr(p.model, "executor", None)
    mortal = executor is not None and executor.options.name == "killable"
    if mortal:
        executor.grow()  # so that another one has what goes

    def end(now: int) -> None:
        if mortal and now == moment:
            kill(executor, victim if p.devices > 1 else 1)  # one device has its steps alone

    for turn in range(2):
        out = p.model(p.batch(draw).repeat(2, 1))  # a chunk for each replica
        yield "output", out
        end(turn)
        p.backward(loss_of(out))
    yield from clip(p, draw)
    end(2)
    p.optimizer.step()
    p.net.zero_grad()  # those of one that went in the step went with it


def edit_grad(p: Program, draw: random.Random) -> None:
    weight, how = p.parameter(draw), draw.randrange(4)
    if weight.grad is None:
        return
    if how == 0:
        weight.grad.mul_(0.5)
    elif how == 1:
        weight.grad = weight.grad * 0.5
    elif how == 2:
        weight.grad.data.clamp_(-0.01, 0.01)
    else:
        weight.grad = None


def view(p: Program, draw: random.Random) -> None:
    grad, how = p.parameter(draw).grad, draw.randrange(3)
    if grad is not None:
        p.views.append(grad if how == 0 else grad.view(-1) if how == 1 else grad.detach())


def use_views(p: Program, draw: random.Random) -> Parts:
    for one in p.views:
        yield "kept view", one
        if draw.random() < 0.5:
            one.mul_(0.5)


def rate(p: Program, draw: random.Random) -> None:
    p.optimizer.param_groups[0]["lr"] = draw.choice((0.003, 0.01, 0.03))


def edit_state(p: Program, draw: random.Random) -> Parts:
    weight = p.parameter(draw)
    for name, value in sorted(p.optimizer.state.get(weight, {}).items()):
        if isinstance(value, Tensor):
            yield name, value
            if value.shape == weight.shape:
                value.mul_(0.5)


ACTIONS: dict[str, Callable[[Program, random.Random], Parts | None]] = {
    one.__name__: one
    for one in (
        *(train, accumulate, step, closure, evaluate, map_batches, with_loss),
        *(twice, two, penalty, regularize, slopes, autocast, failing),
        *(edit, edit_data, freeze, replace, take_out, attribute, mode, hook, save, load, deepcopy),
        *(keep, kept, drop, zero, clip, norm, edit_grad, view, use_views, rate, edit_state, death),
    )
}

_HARMLESS = {
    *("keep", "kept", "evaluate", "map_batches", "accumulate", "failing", "edit", "freeze"),
    *("replace", "take_out", "attribute", "hook", "zero", "clip", "edit_grad"),
}


def sequence(seed: int, length: int) -> list[Step]:
    """Draw a sequence."""
    draw = random.Random(-1 - seed)
    names = [*ACTIONS, *["train", "accumulate"] * 3]
    row: list[Step] = []
    for _ in range(length):
        goes_on = row and row[-1].action in _HARMLESS and draw.random() < 0.5
        name = draw.choice(sorted(_HARMLESS) if goes_on else names)
        row.append(Step(name, draw.randrange(1 << 30), draw.random() < 0.4))
    return row


def play(seed: int, inside: bool, steps: list[Step], wrap: Wrap) -> list[Seen]:
    """Run a sequence; returns what it shows."""
    p = Program(seed, inside, wrap)
    seen: list[Seen] = []
    for number, one in enumerate(steps):
        draw, label = random.Random(one.seed), f"{number}, {one.action}"
        try:
            for what, value in ACTIONS[one.action](p, draw) or ():
                seen.append(Seen(f"{label}: {what}", value.detach().clone(), p.exact))
        except Exception as error:
            seen.append(Seen(f"{label}: {type(error).__name__}", torch.zeros(()), True))
            p.losses.clear()
            for weight in p.net.parameters():  # a backward that fails has done a part upstream
                weight.grad = None
        if one.action not in p.harmless():
            p.losses.clear()
        if one.look:
            for what, value in p.look(draw):
                seen.append(Seen(f"{label}: {what}", value.detach().clone(), p.exact))
    return seen


def difference(ours: list[Seen], plain: list[Seen]) -> str | None:
    """Say where two sides differ first; None if they do not."""
    for one, other in zip(ours, plain, strict=False):
        if one.what != other.what:
            return f"{one.what}, where the plain module gives {other.what}"
        rough = {"rtol": 1e-7, "atol": 1e-9}
        close = {"rtol": 0.0, "atol": 0.0} if other.exact else rough
        try:
            torch.testing.assert_close(one.value, other.value, **close, equal_nan=True)
        except AssertionError as error:
            return f"{one.what}: {error}"
    return None if len(ours) == len(plain) else "one shows more than the other"


def shrunk(steps: list[Step], differs: Callable[[list[Step]], bool]) -> list[Step]:
    """Leave out what a difference does not need."""
    for at in reversed(range(len(steps))):
        fewer = steps[:at] + steps[at + 1 :]
        if differs(fewer):
            steps = fewer
    return steps
