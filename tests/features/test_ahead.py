"""A replica computes a backward before it is asked, where the last ones were alike: nothing shows
of it but time. Beside each model runs one whose replicas are asked for something else in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_gpus
import pytest
import torch
from harness import Apply, raised, tiny_gpt2
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raydp_parallel import DataParallel, convert_sync_batchnorm
from raydp_parallel.hugging_face import attach
from raydp_parallel.replica.replica import Replica

Between = Callable[[], object]
Loop = Callable[[Any, int, Between], None]
"""Makes a step's gradients: takes the wrapper, the step's number, and what follows a forward."""


def counted(_module: nn.Module, _x: Tensor) -> Tensor:
    """Count this replica's backwards from now on: those that are asked for, and that are there."""
    kind: Any = Replica
    if not hasattr(kind, "tally"):
        kind.tally, plain = torch.zeros(1, 2, dtype=int), kind._backward

        def backward(self: Any, request: Any, found: Any) -> Any:
            kind.tally += torch.tensor([1, found is not None])
            return plain(self, request, found)

        kind._backward = backward
    return kind.tally


def tally(model: Any) -> Tensor:
    """The sums of all replicas."""
    with torch.no_grad():
        return model.run(counted, torch.ones(2, 3)).sum(0)  # type: ignore[no-any-return]


def net() -> nn.Module:
    """A net with a buffer and random numbers."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))


def loss_of(model: Any) -> Tensor:
    """A loss of random rows, computed in the replicas."""
    return model.with_loss(nn.MSELoss())(torch.rand(6, 3), torch.rand(6, 1))  # type: ignore[no-any-return]


def scaled(*scales: float) -> Loop:
    """Learn from losses that are scaled, in turn."""

    def loop(model: Any, step: int, between: Between) -> None:
        loss = loss_of(model) * scales[step % len(scales)]
        between()
        loss.backward()

    return loop


plainly = scaled(1.0)


def accumulating(model: Any, step: int, between: Between) -> None:
    """Learn from two batches, and the norm of their gradients."""
    plainly(model, step, between)
    plainly(model, step, between)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def idle(model: Any, step: int, between: Between) -> None:
    """Learn, and compute a loss in vain."""
    loss_of(model)
    plainly(model, step, between)


def twice(model: Any, step: int, between: Between) -> None:
    """Run both forwards before the backwards."""
    losses = [loss_of(model) for _ in range(2)]
    between()
    for loss in losses:
        loss.backward()


def kept(model: Any, step: int, between: Between) -> None:
    """Differentiate a graph twice, at first by the last weights alone."""
    loss = loss_of(model)
    between()
    last = [*model.parameters()][-2:]
    found = torch.autograd.grad(loss, last, retain_graph=True)
    loss.backward()
    for p, grad in zip(last, found, strict=True):
        p.grad += grad


def higher(model: Any, step: int, between: Between) -> None:
    """Learn with a penalty on the gradients."""
    loss = loss_of(model)
    between()
    grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    (loss + 0.01 * sum(grad.square().sum() for grad in grads)).backward()


def in_driver(model: Any, step: int, between: Between) -> None:
    """Learn with the loss in this process: each gradient is another one."""
    loss = (model(torch.rand(6, 3)) - torch.rand(6, 1)).square().mean()
    between()
    loss.backward()


def play(loop: Loop, made: nn.Module, two: Any, steps: int, resident: bool, ahead: bool) -> Any:
    """Play a loop; returns how many backwards were asked for and were there, and the state."""
    torch.manual_seed(5)
    made = copy.deepcopy(made)
    model = DataParallel(made, executor=two)
    kind, how = torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}
    optimizer = model.optimizer(kind, **how) if resident else kind(made.parameters(), **how)
    before = tally(model)
    for step in range(steps):
        loop(model, step, int if ahead else two.flush)
        optimizer.step()
        optimizer.zero_grad()
    return (tally(model) - before).tolist(), model.state_dict()


def check(loop: Loop, made: nn.Module, two: Any, steps: int, resident: bool = False) -> Any:
    """Play a loop with backwards ahead and without; returns how many there are of both kinds."""
    (count, there), learned = play(loop, made, two, steps, resident, True)
    (same, none), like = play(loop, made, two, steps, resident, False)
    assert (same, none) == (count, 0)
    assert all(torch.equal(learned[key], like[key]) for key in like)
    return count, there


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("loop", [plainly, accumulating])
def test_nearly_all_backwards_are_there(two: Any, loop: Loop, resident: bool) -> None:
    count, there = check(loop, net(), two, 40, resident)
    assert count >= 80 and there >= 0.95 * count


@pytest.mark.parametrize(
    ("loop", "there"),
    [
        (scaled(1, 1, 3, 3, 3, 1), 3),
        (scaled(1, 2, 1, 2), 0),
        (scaled(1, 1, 1, 1, 2, 2, 2, 2), 6),
        (kept, 10),
        *((loop, 0) for loop in (idle, twice, higher, in_driver)),
    ],
)
def test_only_what_was_asked_for_twice_is_there(two: Any, loop: Loop, there: int) -> None:
    assert check(loop, net(), two, 12)[1] == 2 * there


class Noted(torch.autograd.Function):
    """Writes a line as it is differentiated, and draws a random number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, path: str) -> Tensor:
        ctx.path = path
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        note(ctx.path)
        return grad * torch.rand_like(grad), None


def note(path: str, value: Any = None) -> Any:
    """Write a line, as a hook or as a layer."""
    with open(path, "a") as file:
        file.write("once\n")
    return value


def hooked(y: Tensor, name: str, path: str) -> Tensor:
    """An output with a hook, its own or of its node."""
    getattr(y if name == "register_hook" else y.grad_fn, name)(lambda *_: note(path))
    return y


def retained(y: Tensor, path: str) -> Tensor:
    """An output whose gradient another node looks at."""
    out = y.tanh()
    out.retain_grad()
    y.grad_fn.register_prehook(lambda grads: (grads[0] * out.grad, note(path))[:1])  # type: ignore[union-attr]
    return out


def unpacked(layer: nn.Module, x: Tensor, path: str) -> Tensor:
    """An output that unpacks what it saved."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: note(path, t)):
        return layer(x).tanh()  # type: ignore[no-any-return]


def again(layer: nn.Module, x: Tensor, path: str, reentrant: bool) -> Tensor:
    """An output that is computed again in backward."""

    def run(x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() >= 0:
            note(path)
        return layer(x)  # type: ignore[no-any-return]

    return checkpoint(run, x + layer.bias, use_reentrant=reentrant)  # type: ignore[no-any-return]


def of_module(name: str, path: str) -> nn.Module:
    """A layer with a hook that a module may have."""
    layer = nn.Linear(3, 1)
    getattr(layer, name)(lambda *_: note(path))
    return layer


ODD: dict[str, Callable[[str], nn.Module]] = {
    "function": lambda path: layered(lambda self, x: Noted.apply(self.layer(x), path)),
    "tensor": lambda path: layered(lambda self, x: hooked(self.layer(x), "register_hook", path)),
    "node": lambda path: layered(lambda self, x: hooked(self.layer(x), "register_prehook", path)),
    "retained": lambda path: layered(lambda self, x: retained(self.layer(x), path)),
    "unpacked": lambda path: layered(lambda self, x: unpacked(self.layer, x, path)),
    "checkpoint": lambda path: layered(lambda self, x: again(self.layer, x, path, False)),
    "reentrant": lambda path: layered(lambda self, x: again(self.layer, x, path, True)),
    "module": lambda path: of_module("register_full_backward_hook", path),
    "legacy": lambda path: of_module("register_backward_hook", path),
}
"""Modules with code of their own in backward, which writes a line to a file."""


def layered(forward: Callable[..., Tensor]) -> Apply:
    """A module with one layer."""
    return Apply(forward, layer=nn.Linear(3, 1))


@pytest.mark.parametrize("kind", ODD)
def test_code_of_the_modules_runs_once_and_when_it_is_asked_for(
    two: Any, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "lines"
    assert check(scaled(1, 1, 1, 3), ODD[kind](str(path)), two, 8) == (16, 0)
    each = 2 if kind == "unpacked" else 1  # the layer saves its input, and tanh its result
    assert len(path.read_text().splitlines()) == 2 * 16 * each


@pytest.mark.parametrize("shared", [False, True])
def test_another_output_is_differentiated_afterwards(two: Any, shared: bool) -> None:
    """It can be if it has a graph of its own; else torch refuses that."""

    def forward(net: Any, x: Tensor) -> Any:
        y = net.a(x).tanh()
        return y, y.exp() if shared else net.b(x)

    net = Apply(forward, a=nn.Linear(3, 1), b=nn.Linear(3, 1))
    model = DataParallel(net, executor=two)
    for _ in range(4):
        one, other = model(torch.ones(4, 3))
        one.sum().backward()
        error = raised(other.sum().backward) if shared else other.sum().backward()
        assert error is None or "through the graph a second time" in str(error)


def test_layers_that_exchange_tensors_wait_for_each_other(two: Any) -> None:
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    assert check(plainly, convert_sync_batchnorm(made), two, 5) == (10, 0)


def test_a_weight_that_was_changed_since_is_seen(two: Any) -> None:
    model = DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), executor=two)
    for step in range(4):
        plainly(model, step, int)
    with pytest.raises(RuntimeError, match="inplace operation"):
        plainly(model, 4, lambda: model.module[1].weight.detach().mul_(2))


def test_what_was_computed_in_vain_is_freed(two: Any) -> None:
    model = DataParallel(net(), executor=two)
    for step in range(4):
        plainly(model, step, int)
    loss_of(model)
    assert {graphs for _, graphs in two.flush()} == {0}


@pytest.mark.skipif(on_gpus.asked()[-1].isdigit(), reason="Trainers take all GPUs of the driver")
def test_of_the_trainer_too(two: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made, words = tiny_gpt2(), torch.randint(48, (160, 12))
    model = DataParallel(made, executor=two)
    off = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        label_names=["labels"],
        use_cpu=True,
        **off,
    )
    rows = [{"input_ids": row, "labels": row} for row in words]
    before = tally(model)
    attach(transformers.Trainer(made, arguments, train_dataset=rows), model).train()
    count, there = (tally(model) - before).tolist()
    assert count == 80 and there >= 0.95 * count
