"""Random sequences of what programs do with one wrapper, beside the plain module that does the
same.

A sequence is a seed, which chooses the net and the optimizers, and a list of steps. Each step has a
seed of its own, so that any other step can be left out.

``python -m sequences --count 10000``, with this folder, tests/device and the checkout on the path,
plays as many on forked replicas, and says how many actions that were, and how to play one alone.
With ``--device`` they are on stand-in GPUs, as tests are.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gc
import importlib
import io
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import on_gpus  # before torch

# isort: split
import forked
import oracle
import torch
from harness import MOMENTS, dying
from random_nets import (
    INEXACT,
    WIDTH,
    Checkpointed,
    Words,
    block,
    made,
    scale_output,
    shift_input,
    squash_grad,
)
from torch import Tensor, nn
from torch.nn.functional import linear

from raydp_parallel import DataParallel, Executor, Options
from raydp_parallel.batch.splitting import weighted_sizes

KINDS = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad

Parts = Iterator[tuple[str, Tensor]]
Action = Callable[[Any, random.Random], Parts | None]


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
        if torch.is_autocast_enabled(x.device.type):
            return linear(x.float(), self.weight.float(), self.bias.float()).double()
        return super().forward(x)


class Box:
    """An output that joins its chunks itself, and keeps their tensors as they are."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts

    @classmethod
    def __gather__(cls, boxes: list[Box], _device: Any, _dim: int) -> Box:
        return cls([part for box in boxes for part in box.parts])


class Net(nn.Module):
    """A random net; chunks with a negative first number fail where they are told to."""

    def __init__(self, draw: random.Random, width: int, drops: bool) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Tanh(), nn.Dropout(0.3)) if drops else nn.Tanh()
        first = Lower(width, width), hidden, nn.Linear(width, WIDTH)
        self.body = nn.Sequential(*first, *[block(draw, 2) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)
        self.gain = nn.Parameter(torch.ones(()))
        self.scale = 1.0

    def forward(self, x: Tensor, fail: str = "", gain: Tensor | None = None) -> Tensor:
        hidden = self.body(x)
        if fail and x[0, 0] < 0:
            if fail == "forward":
                raise LookupError("as told")
            hidden.register_hook(raising)
        out = self.head(hidden) * self.scale * self.gain
        return out if gain is None else out * gain

    def negative(self, x: Tensor) -> Tensor:
        return -self(x)

    def boxed(self, x: Tensor) -> Any:
        out = self(x)
        return {"out": out, "pair": (out, out), "box": Box([out * 2, out.detach()])}

    def has(self, kind: Any) -> bool:
        return any(isinstance(part, kind) for part in self.modules())


def raising(_grad: Tensor) -> None:
    raise LookupError("as told, in backward")


def squared(net: nn.Module, x: Tensor) -> Tensor:
    """A function for `run`."""
    out: Tensor = net(x)
    return out.square()


class Plain(nn.Module):
    """Calls its module for each chunk; all begin with the same buffers, and one's writes stay."""

    calls: ClassVar[list[Any]] = []  # of each the chunks' graphs, with their leaves, and parameters

    def __init__(self, module: nn.Module, devices: int, unused: str, weights: Any) -> None:
        super().__init__()
        self.module, self.devices, self.unused = module, devices, unused
        self.weights = weights or (1,) * devices  # which cut as `torch.chunk` does

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.run(lambda module, x: module(x, **kwargs), x)

    def call(self, name: str, x: Tensor) -> Any:
        return self.run(lambda module, x: getattr(module, name)(x), x)

    def run(self, function: Callable[..., Any], x: Tensor) -> Any:
        buffers, outs = [*self.module.buffers()], []
        before = after = _contents(buffers)
        params = [w for w in self.module.parameters() if w.requires_grad]
        try:
            sizes = weighted_sizes(len(x), self.devices, self.weights)
            for number, chunk in enumerate(x.split(sizes)):
                try:
                    outs.append(function(self.module, chunk))
                finally:
                    if not number:
                        after = _contents(buffers)
                    _write(buffers, before)
        finally:
            _write(buffers, after)
        parts = [out if isinstance(out, Tensor) else out["out"] for out in outs]
        if self.unused == "zeros" and torch.is_grad_enabled():
            self.calls.append(([(part.grad_fn, leaves(part.grad_fn)) for part in parts], params))
        out = torch.cat(parts)
        if parts[0] is outs[0]:
            return out
        return {"pair": (out, out), "box": Box.__gather__([o["box"] for o in outs], None, 0)}

    @classmethod
    def fill(cls, loss: Tensor) -> None:
        """After a backward, let what no chunk of a call has used have zeros added, which its hooks
        see, and what some have not used be dense.
        """
        nodes = reachable(loss.grad_fn)
        used, unused = set[Tensor](), set[Tensor]()
        for chunks, params in cls.calls:
            found = [leaves if root in nodes else set() for root, leaves in chunks]
            if any(w in leaves for w in params for leaves in found):
                used.update(*found)
                unused.update(w for w in params if not all(w in leaves for leaves in found))
        # What the loss uses itself has its gradient in one piece, with these zeros.
        own = {node.variable for node in nodes if hasattr(node, "variable")} - used
        for w in [w for w in unused - own if w.requires_grad]:
            if w not in used:
                w.backward(torch.zeros_like(w))
            elif w.grad is not None and w.grad.is_sparse:
                w.grad = w.grad.to_dense()

    def map(self, batches: list[Tensor], split: bool) -> Iterator[Tensor]:
        with torch.no_grad():
            for x in batches:
                before = _contents(self.module.buffers())
                try:
                    yield self(x) if split else self.module(x)
                finally:
                    _write([*self.module.buffers()], before)

    def with_loss(self, criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, y: criterion(self(x), y)


@torch.inference_mode(False)
def _contents(buffers: Iterable[Tensor]) -> list[Tensor]:
    return [buffer.clone() for buffer in buffers]


@torch.inference_mode(False)
def _write(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        if buffer.shape == value.shape:
            buffer.data.copy_(value)  # no graph of batch norm's is asked for its version
        else:
            buffer.data = value.clone()


def reachable(node: Any) -> set[Any]:
    """The nodes of a graph."""
    found, row = {None}, [node]
    while row:
        if (one := row.pop()) not in found:
            found.add(one)
            row += [other for other, _ in one.next_functions]
    return found - {None}


def leaves(node: Any) -> set[Tensor]:
    """The tensors that get gradients from a graph."""
    return {one.variable for one in reachable(node) if hasattr(one, "variable")}


Wrap = Callable[[nn.Module, int, str, Any], Any]


def wrapping(executor: Executor) -> Wrap:
    """Make wrappers of an executor."""

    def wrap(net: nn.Module, devices: int, unused: Any, weights: Any) -> Any:
        options = Options(unused_grads=unused, chunk_weights=weights)
        return DataParallel(net, ["cpu"] * devices, executor=executor, options=options)

    return wrap


class Program:
    """One program: a net, its wrapper, an optimizer, and what it has kept."""

    def __init__(self, seed: int, run: str, wrap: Wrap) -> None:
        draw = random.Random(seed)
        self.inside, self.deadly = "replicas" in run, "deaths" in run
        self.wrap, self.rough = wrap, seed % 2 == 0
        self.devices = draw.choice((1, 2, 2, 2, 2))
        self.width = draw.choice((3, 3, 96))  # those of 96 x 96 numbers lie in windows
        self.unused = draw.choice(("zeros", "none"))
        self.weights = draw.choice((None, None, (3, 1))) if self.devices == 2 else None
        net: Net = made(draw, lambda: Net(draw, self.width, drops(seed, run)))
        self.model: Any = self.wrapper(net.double())
        self.exact = not net.has(INEXACT)
        self.kind, self.fused = draw.choice(KINDS), draw.random() < 0.7
        self.sparse = net.has(Words)
        if self.sparse:  # the others take no sparse gradients
            self.kind = torch.optim.SGD
        self.fused = self.fused and self.kind is not torch.optim.SGD  # fails if some have no grad
        self.keywords = {"lr": 0.01, **({"fused": True} if self.fused else {})}
        more = {"momentum": 0.0 if self.sparse else 0.9}
        self.keywords |= more if self.kind is torch.optim.SGD else {"eps": 1e-5}
        # How many optimizers share the parameters; what the second one needs, the first one's step
        # may have lost with a replica.
        self.parts = draw.choice((1, 1, 1 if self.inside and self.deadly else 2))
        self.both = draw.random() < 0.5  # only the first of them is in the replicas
        self.new_optimizer()
        self.saved: Any = None
        self.outs: list[Tensor] = []
        self.boxes: list[Box] = []
        self.losses: list[Tensor] = []
        self.views: list[Tensor] = []
        self.handles: list[Any] = []
        Plain.calls.clear()

    @property
    def net(self) -> Any:
        return self.model.module

    def wrapper(self, net: nn.Module) -> Any:
        return self.wrap(net, self.devices, self.unused, self.weights)

    def new_optimizer(self) -> None:
        params = [*self.model.parameters()]
        self.optimizers = []
        for number in range(self.parts):
            inside = self.inside and hasattr(self.model, "executor") and not (number and self.both)
            make = (
                self.model.optimizer if inside else lambda kind, *rest, **more: kind(*rest, **more)
            )
            self.optimizers.append(make(self.kind, params[number :: self.parts], **self.keywords))

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def optimizer(self, draw: random.Random) -> Any:
        return draw.choice(self.optimizers)

    def batch(self, draw: random.Random) -> Tensor:
        rows = draw.choice((1, 4, 5, 7, 8))
        return made(draw, lambda: torch.randn(rows, self.width, dtype=torch.float64))

    def backward(self, loss: Tensor, **how: Any) -> None:
        """Replicas add each chunk's gradients of several backwards before those of all chunks."""
        if self.inside and any(p.grad is not None for p in self.net.parameters()):
            self.exact = False
        if not isinstance(self.model, Plain):
            return loss.backward(**how)
        params = [*self.net.parameters()]
        before = [None if w.grad is None else w.grad.clone() for w in params]
        try:
            loss.backward(**how)
        except Exception:  # what was added until then does not count, as upstream
            for w, grad in zip(params, before, strict=True):
                if grad is None or grad.is_sparse:
                    w.grad = grad
                elif w.grad is not None:
                    w.grad.data.copy_(grad)
            raise
        return self.model.fill(loss)

    def slopes(self, loss: Tensor, wanted: list[Tensor]) -> Any:
        """`autograd.grad`, where zeros may stand for what was not used."""
        zeros = isinstance(self.model, Plain) and self.unused == "zeros"
        found = torch.autograd.grad(loss, wanted, allow_unused=zeros)
        rows = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]
        for at, w in enumerate(wanted if zeros else ()):  # what some chunks have not used is dense
            if rows[at].is_sparse and not all(w in own for _, own in Plain.calls[-1][0]):
                rows[at] = rows[at].to_dense()
        return rows

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
        known = {w for one in self.optimizers for row in one.param_groups for w in row["params"]}
        # The next step begins with new tensors in the replicas, and the graph keeps the older ones.
        anew = self.inside and known != {*self.net.parameters()}
        return _HARMLESS if self.fused or anew else _HARMLESS | {"train", "step"}

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
    p.step()


def accumulate(p: Program, draw: random.Random) -> Parts:
    x, how = p.batch(draw).requires_grad_(draw.random() < 0.5), draw.randrange(4)
    if how == 0:
        out = p.model.call("negative", x)
    elif how == 1:
        out = p.model.run(squared, x)
    else:
        out = (p.model if how == 2 else p.wrapper(p.net))(x)
    yield "output", out
    p.backward(loss_of(out))
    if x.grad is not None:
        yield "gradient of x", x.grad


def step(p: Program, draw: random.Random) -> None:
    p.optimizer(draw).step()


def closure(p: Program, draw: random.Random) -> Parts:
    x = p.batch(draw)

    def again() -> Tensor:
        p.net.zero_grad()
        loss = loss_of(p.model(x))
        p.backward(loss)
        return loss

    yield "loss", p.optimizer(draw).step(again)


def evaluate(p: Program, draw: random.Random) -> Parts:
    with draw.choice((torch.no_grad, torch.inference_mode))():
        for _ in range(2):
            yield "output", (out := p.model(p.batch(draw)))
            yield "its mode", torch.tensor(out.is_inference())
        if draw.random() < 0.3 and p.kind is not torch.optim.Adagrad:  # which makes its state here
            p.new_optimizer()


def map_batches(p: Program, draw: random.Random) -> Parts:
    batches = [p.batch(draw) for _ in range(3)]
    for out in p.model.map(batches, split=draw.random() < 0.3):
        yield "output", out


def with_loss(p: Program, draw: random.Random) -> Parts:
    p.exact = False  # a chunk's mean is weighted
    x, scale = p.batch(draw), 1.0
    for _ in range(draw.choice((1, 1, 4))):  # backwards of the last ones may be there by then
        zero(p, draw)
        scale *= draw.choice((1.0, 1.0, 1.0, 2.0))
        p.backward(scale * (loss := p.model.with_loss(nn.MSELoss())(x, x[:, :2])))
        yield "loss", loss
        p.step()


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
    for slope in p.slopes(loss_of(p.model(p.batch(draw))), wanted):
        yield "slope", slope


def argument(p: Program, draw: random.Random) -> None:
    """A weight is an argument, or in a closure, too."""
    x, w = p.batch(draw), p.parameter(draw)
    p.exact = False  # its two gradients are added in another order
    if draw.random() < 0.5:
        out = p.model(x, gain=p.net.gain)
    else:
        out = p.model.run(lambda net, x: net(x) + w.square().sum(), x)
    p.backward(loss_of(out))


def boxed(p: Program, draw: random.Random) -> Parts:
    with torch.set_grad_enabled(draw.random() < 0.5):
        found = p.model.call("boxed", p.batch(draw))
    p.boxes = [*p.boxes[-2:], found["box"]]
    yield "output", found["pair"][1]
    if found["pair"][0].requires_grad:
        p.backward(loss_of(draw.choice((found["pair"][0], found["box"].parts[0]))))


def use_boxes(p: Program, draw: random.Random) -> Parts:
    for box in p.boxes:
        for part in box.parts:
            yield "kept part", part


def autocast(p: Program, draw: random.Random) -> Parts:
    p.model.zero_grad()
    with torch.autocast(oracle.place.type, torch.bfloat16):
        out = p.model(p.batch(draw))
    yield "output", out
    p.backward(loss_of(out))


def failing(p: Program, draw: random.Random) -> Parts:
    how = draw.choice(("forward", "backward"))
    p.net.zero_grad()  # those of before a step would be lost with those of the failing backward
    try:
        p.backward(loss_of(p.model(p.batch(draw))))
        out = p.model(p.batch(draw), fail=how)
        yield "output", out
        if how == "backward":
            p.backward(loss_of(out))
    except LookupError:
        yield "failed", torch.ones(())
    for weight in p.net.parameters():
        if weight.grad is not None:
            yield "gradient", weight.grad
    p.net.zero_grad()


def edit(p: Program, draw: random.Random) -> None:
    with draw.choice((torch.no_grad, torch.inference_mode))():
        p.tensor(draw).mul_(0.9)


def edit_data(p: Program, draw: random.Random) -> None:
    tensor, how = p.tensor(draw), draw.randrange(3)
    if how == 0:
        tensor.data.mul_(0.9)
    elif how == 1:
        tensor.data = tensor.data * 0.9
    else:
        array = p.parameter(draw).detach().numpy()  # a buffer could not be resized any more
        array *= 0.9


def swap(p: Program, draw: random.Random) -> None:
    drop(p, draw)  # torch refuses what graphs look at
    weight = p.parameter(draw)
    other = nn.Parameter(weight.detach() * 0.9, weight.requires_grad)
    torch.utils.swap_tensors(weight, other)


SETTINGS: tuple[tuple[Callable[[Any], object], Any, Any], ...] = (
    (torch.use_deterministic_algorithms, False, True),
    (torch.set_default_dtype, torch.float32, torch.float64),
    (torch.set_float32_matmul_precision, "highest", "high"),
    (lambda on: torch.autograd.set_detect_anomaly(on, check_nan=False), False, True),
)


def setting(p: Program, draw: random.Random) -> None:
    change, *values = draw.choice(SETTINGS)
    change(draw.choice(values))


def freeze(p: Program, draw: random.Random) -> None:
    one = draw.choice((p.net, p.parameter(draw), p.parameter(draw), p.parameter(draw)))
    one.requires_grad_(draw.random() < 0.5)


def replace(p: Program, draw: random.Random) -> None:
    at = draw.choice((0, 3, 4, 5))
    layer = made(draw, lambda: block(draw, 1) if at else nn.Linear(p.width, p.width)).double()
    if any(isinstance(part, Words) for part in layer.modules()):
        layer = nn.Identity()  # the optimizers take no sparse gradients
    p.exact = p.exact and not p.net.has(INEXACT)
    p.net.body[at] = layer
    p.exact = p.exact and not p.net.has(INEXACT)
    how = draw.randrange(3)
    if how == 0:
        p.new_optimizer()
    elif how == 1 and [*layer.parameters()] and p.kind is not torch.optim.Adagrad:
        # Whose constructor makes its state, and so it does in a replica, before a first gradient.
        p.optimizer(draw).add_param_group({"params": layer.parameters()})


def take_out(p: Program, draw: random.Random) -> Parts:
    at = draw.choice((0, 1, 3, 4, 5))
    layer, p.net.body[at] = p.net.body[at], nn.Identity()
    try:
        with torch.set_grad_enabled(draw.random() < 0.5):
            yield "output", p.model(p.batch(draw))
    finally:
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
        p.handles.append(weight.register_hook(half))
    elif weight.requires_grad:
        p.handles.append(weight.register_post_accumulate_grad_hook(_halve))


def half(grad: Tensor | None) -> Tensor | None:
    """Torch calls it with None where the outputs of some chunks alone depend on a parameter."""
    return None if grad is None else grad * 0.5


def _halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.5)


def save(p: Program, draw: random.Random) -> None:
    p.saved = io.BytesIO()
    torch.save((p.model.state_dict(), [one.state_dict() for one in p.optimizers]), p.saved)


def load(p: Program, draw: random.Random) -> None:
    if p.saved is not None:
        p.saved.seek(0)
        weights, states = torch.load(p.saved)
        p.model.load_state_dict(weights)
        if draw.random() < 0.5:
            for one, state in zip(p.optimizers, states, strict=True):
                one.load_state_dict(state)


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
    for kept in (p.outs, p.losses, p.views, p.boxes, Plain.calls):
        kept.clear()
    torch.ones((), requires_grad=True).backward()  # torch drops what a failed one had still to do
    gc.collect()


def zero(p: Program, draw: random.Random) -> None:
    for one in draw.choice(([p.model], [p.net], p.optimizers)):
        one.zero_grad(set_to_none=draw.random() < 0.6)


def clip(p: Program, draw: random.Random) -> Parts:
    params, how = [w for w in p.net.parameters() if w.grad is not None], draw.randrange(3)
    one = p.optimizer(draw)
    if p.sparse:  # which torch does not clip
        return
    if how == 0 and params:
        torch.nn.utils.clip_grad_value_(params, 0.01)
    elif how == 1 and hasattr(one, "clip_grad_norm_"):
        yield "norm", one.clip_grad_norm_(0.1)
    else:
        own = [w for group in one.param_groups for w in group["params"]]
        yield "norm", torch.nn.utils.clip_grad_norm_(own, 0.1)


def norm(p: Program, draw: random.Random) -> Parts:
    one = p.optimizer(draw)
    if hasattr(one, "grad_norm") and not p.sparse:
        yield "norm", one.grad_norm()
    elif not p.sparse:
        own = [w for group in one.param_groups for w in group["params"]]
        grads = [w.grad for w in own if w.grad is not None]
        yield "norm", torch.nn.utils.get_total_norm(grads)


def death(p: Program, draw: random.Random) -> Parts:
    """Do this and that, while a replica ends on the way, if it may. What only it had is dropped."""
    drop(p, draw)
    p.net.zero_grad()
    alone = [name for name in _ALONE if p.rough or name not in _ROUGH]
    names, moment = draw.choices(alone, k=4), draw.choice(MOMENTS)
    executor, at = getattr(p.model, "executor", None), draw.randrange(24)
    mortal = executor is not None and executor.options.name == "killable"
    mortal = mortal and not (p.inside and p.devices == 1)  # whose replica has the steps alone
    with dying(executor, at, moment) if mortal else contextlib.nullcontext():
        for name in names:
            for what, value in shown(p, ACTIONS[name], draw):
                yield f"{name}, {what}", value
            if name in _STEPS:  # what was kept before may be lost with the replica
                p.net.zero_grad()
    p.net.zero_grad()


def shown(p: Program, action: Action, draw: random.Random) -> Parts:
    """Take an action; an error is a part of what it shows."""
    try:
        for what, value in action(p, draw) or ():
            if value.is_sparse:
                what, value = f"{what}, sparse", value.to_dense()
            yield what, value.detach().clone()
    except Exception as error:
        yield type(error).__name__, torch.zeros(())
        p.losses.clear()
        if p.inside:  # what replicas had kept may be lost, after a backward that failed
            p.net.zero_grad()


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
    if grad is not None and not p.sparse:
        p.views.append(grad if how == 0 else grad.view(-1) if how == 1 else grad.detach())


def use_views(p: Program, draw: random.Random) -> Parts:
    for one in p.views:
        yield "kept view", one
        if draw.random() < 0.5:
            one.mul_(0.5)


def rate(p: Program, draw: random.Random) -> None:
    p.optimizer(draw).param_groups[0]["lr"] = draw.choice((0.003, 0.01, 0.03))


def edit_state(p: Program, draw: random.Random) -> Parts:
    weight = p.parameter(draw)
    for name, value in sorted(p.optimizer(draw).state.get(weight, {}).items()):
        if isinstance(value, Tensor):
            yield name, value
            if value.shape == weight.shape:
                value.mul_(0.5)


ACTIONS: dict[str, Action] = {
    one.__name__: one
    for one in (
        *(train, accumulate, step, closure, evaluate, map_batches, with_loss),
        *(twice, two, penalty, regularize, slopes, argument, boxed, use_boxes, autocast, failing),
        *(edit, edit_data, freeze, replace, take_out, attribute, mode, hook, save, load, deepcopy),
        *(keep, kept, drop, zero, clip, norm, edit_grad, view, use_views, rate, edit_state, death),
        *(swap, setting),
    )
}

_HARMLESS = {
    *("keep", "kept", "evaluate", "map_batches", "accumulate", "failing", "edit", "freeze"),
    *("replace", "take_out", "attribute", "hook", "zero", "clip", "edit_grad", "use_boxes"),
}

_ROUGH = {"with_loss", "penalty", "regularize", "argument"}
"""After these gradients are added in another order than the plain module's."""

_STEPS = ("train", "closure", "with_loss")
_ALONE = (
    *(*_STEPS, "accumulate", "clip", "norm", "train", "accumulate", "evaluate", "map_batches"),
    *("twice", "two", "penalty", "boxed", "failing", "argument", "slopes", "edit_state", "rate"),
)
"""What needs nothing that a replica has alone."""


def sequence(seed: int, run: str, length: int = 30) -> list[Step]:
    """Draw a sequence. All that half of them show is the same to the bit."""
    draw = random.Random(f"{run} {seed}")
    names = [*ACTIONS, *["train", "accumulate"] * 3, *["death"] * 6 * ("deaths" in run)]
    if seed % 2:
        names = [name for name in names if name not in _ROUGH]
    row: list[Step] = []
    for _ in range(length):
        goes_on = row and row[-1].action in _HARMLESS and draw.random() < 0.5
        name = draw.choice(sorted(_HARMLESS) if goes_on else names)
        row.append(Step(name, draw.randrange(1 << 30), draw.random() < 0.4))
    return row


def play(seed: int, run: str, steps: list[Step], wrap: Wrap) -> list[Seen]:
    """Run a sequence; returns what it shows."""
    p = Program(seed, run, wrap)
    seen: list[Seen] = []
    try:
        for number, one in enumerate(steps):
            draw, label = random.Random(one.seed), f"{number}, {one.action}"
            for action in (ACTIONS[one.action], Program.look)[: 1 + one.look]:
                for what, value in shown(p, action, draw):
                    seen.append(Seen(f"{label}: {what}", value, p.exact))
                if one.action not in p.harmless():
                    p.losses.clear()
                if not p.losses:
                    Plain.calls.clear()
    finally:
        for change, usual, _ in SETTINGS:
            change(usual)
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


# --- many of them ---

RUNS = "driver", "replicas", "driver, deaths", "replicas, deaths"
"""Where the optimizers are, and whether replicas end."""


def drops(seed: int, run: str) -> bool:
    """Tell if the net draws random numbers, which the plain module would draw otherwise."""
    return "deaths" in run and seed % 3 == 0


def check(seed: int, run: str, steps: list[Step], executors: dict[str, Executor]) -> str | None:
    """Say where a wrapper and the plain module differ first. Deaths change no bit."""
    ours = play(seed, run, steps, wrapping(executors["killable" if "deaths" in run else "two"]))
    told = None if drops(seed, run) else difference(ours, play(seed, run, steps, Plain))
    if told is None and "deaths" in run:
        calm = play(seed, run, steps, wrapping(executors["two"]))
        told = difference(ours, [one._replace(exact=True) for one in calm])
        told = told and f"without deaths: {told}"
    return told


def report(seed: int, run: str, steps: list[Step], executors: dict[str, Executor]) -> str | None:
    """Check a sequence, and tell which of its steps a difference needs."""
    told = check(seed, run, steps, executors)
    if told is None:
        return None
    steps = shrunk(steps, lambda fewer: check(seed, run, fewer, executors) is not None)
    told = check(seed, run, steps, executors) or f"not again: {told}"
    alone = f"python -m sequences --device {on_gpus.asked()} --run {run!r} --first {seed} --count 1"
    return "\n".join([f"{alone}: {told}", *map(str, steps)])


def main() -> None:
    """Play many sequences on forked replicas."""
    parser = argparse.ArgumentParser(prog="python -m sequences", description=main.__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many, of all runs in turn")
    parser.add_argument("--length", type=int, default=30, help="how many actions each has")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--run", choices=[*RUNS], help="of this one alone")
    parser.add_argument("--device", choices=on_gpus.PLACES, default="cpu", help="as of the tests")
    how = parser.parse_args()
    warnings.simplefilter("ignore")
    on_gpus.use()
    forked.start()
    on_gpus.place()
    forked.use(True)
    torch.set_num_threads(1)
    Options.__init__.__kwdefaults__.update(threads=1)
    executors = {
        name: Executor(["cpu"] * 2, options=Options(name=name)) for name in ("two", "killable")
    }
    runs = [how.run] if how.run else [*RUNS]
    tried: Counter[str] = Counter()
    begun, wrong = time.monotonic(), 0
    importlib.import_module("torch._dynamo")  # as optimizers do
    gc.freeze()
    for number in range(how.count):
        seed, run = how.first + number // len(runs), runs[number % len(runs)]
        steps = sequence(seed, run, how.length)
        tried.update(one.action for one in steps)
        faulthandler.dump_traceback_later(300, exit=True)
        told = report(seed, run, steps, executors)
        if told is not None:
            wrong += 1
            print(told, flush=True)
    faulthandler.cancel_dump_traceback_later()
    for one in executors.values():
        one.close()
    print(
        f"{how.count} sequences, {tried.total()} actions in {time.monotonic() - begun:.0f} s, "
        f"{wrong} wrong"
    )
    print(", ".join(f"{count} {name}" for name, count in tried.most_common()))
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    import sequences

    sequences.main()  # so that replicas import its classes
