"""`DataParallel.optimizer` gives the bits of the same optimizer in the driver, whatever dies."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from harness import Apply, carried, dying, kill, made_of, ones, raised
from mortal import same
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, spectral_norm
from torch.testing._internal.two_tensor import TwoTensor

from raydp_parallel import DataParallel, Executor, Options, convert_sync_batchnorm
from raydp_parallel.cluster.replica_set import ReplicaSet
from raydp_parallel.cluster.start import Starter
from raydp_parallel.errors import GraphLost, StateLost


def net() -> nn.Module:
    """Batch norm, dropout, tied weights, a frozen and an unused parameter."""
    middle, tied = nn.Linear(8, 8), nn.Linear(8, 8)
    tied.weight, tied.unused = middle.weight, nn.Linear(3, 3)
    first = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), middle, nn.ReLU(), tied, nn.ReLU()
    return nn.Sequential(
        *first, nn.Dropout(0.2), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)
    )


def optimizer_of(model: Any, inside: bool, kind: Any, params: Any = None, **keywords: Any) -> Any:
    """Make an optimizer in the replicas, or in this process."""
    if inside:
        return model.optimizer(kind, params, **keywords)
    return kind(model.parameters() if params is None else params, **keywords)


def held(model: Any, optimizer: Any) -> list[Tensor]:
    """Copy weights, buffers and the optimizer's state."""
    found = [*model.state_dict().values()]
    for values in optimizer.state_dict()["state"].values():
        values = [v for v in values.values() if isinstance(v, Tensor | float)]
        found += [torch.as_tensor(v, device="cpu") for v in values]
    return [tensor.clone() for tensor in found]


def layers() -> nn.Module:
    """Make a small net."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def small(
    executor: Executor,
    inside: bool = True,
    make: Any = layers,
    kind: Any = torch.optim.Adam,
    params: Any = None,
    **settings: Any,
) -> tuple[DataParallel[Any], Any]:
    """Make a small model and its optimizer; a function may say which parameters it has."""
    torch.manual_seed(0)
    model = DataParallel(make(), executor=executor)
    settings = {"lr": 0.01, **copy.deepcopy(settings)}
    return model, optimizer_of(model, inside, kind, params and params(model), **settings)


def advance(model: DataParallel[Any], optimizer: Any, step: int) -> Tensor:
    """Make one step of training."""
    torch.manual_seed(step)
    optimizer.zero_grad()
    loss: Tensor = model(torch.randn(8, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def compare(
    executor: Executor,
    program: Callable[..., Any],
    *made: Any,
    close: bool = False,
    behind: int | None = None,
    **settings: Any,
) -> None:
    """Run a program with the optimizer in this process and in the replicas: it returns the same
    tensors, and so do weights and state. The master may have to be so many steps behind by then.
    """
    results = []
    for inside in (False, True):
        model, optimizer = small(executor, inside, *made, **settings)
        seen = [t.detach().clone() for t in program(model, optimizer) or ()]
        assert behind is None or model.stats().steps_behind == behind * inside
        results.append([*seen, *held(model, optimizer)])
    assert close or same(*results)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def clipped(optimizer: Any, most: float) -> Tensor:
    """Clip gradients where they are; returns their norm."""
    if hasattr(optimizer, "clip_grad_norm_"):
        return optimizer.clip_grad_norm_(most)  # type: ignore[no-any-return]
    return clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], most)


def train(model: Any, optimizer: Any) -> Any:
    """Train six steps with a scheduler; half of the gradients are clipped."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in range(6):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=step % 3 > 0)
        count = 12 if step != 1 else 1  # one chunk
        x, y = torch.randn(count, 6), torch.randint(0, 3, (count,))
        model.train(count > 1)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        yield loss
        if step % 2:
            yield clipped(optimizer, 0.3)
        if step == 5:  # among them zeros of what nothing has used
            yield from [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        scheduler.step()


# --- the same bits ---

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "weight_decay": 0.1}),
    "foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "foreach": False}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01, "foreach": False}),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases are a group of their own."""
    named = [*model.named_parameters()]
    biases, others = ([p for n, p in named if ("bias" in n) == of] for of in (True, False))
    return [{"params": biases, "lr": 0.002, "of the program's": np.ones(2)}, {"params": others}]


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_T1_the_bits_of_the_optimizer_in_the_driver(
    kind: str, replicas: int, executors: Any
) -> None:
    """With two groups, a scheduler, and a batch of one chunk."""
    made, settings = KINDS[kind]
    compare(executors(replicas), train, net, made, groups, behind=6, **settings)


def test_T1_two_nets(two: Executor) -> None:
    """A generator and a critic, each with its optimizer, and a part that a third model shares."""

    def program(maker: Any, optimizer: Any) -> Any:
        net, inside = nn.Linear(2, 1), hasattr(optimizer, "grad_norm")
        critic, both = (
            DataParallel(n, executor=two) for n in (net, nn.Sequential(maker.module, net))
        )
        optimizers = optimizer, optimizer_of(critic, inside, torch.optim.Adam, lr=0.1)
        for step in range(4):
            noise = torch.randn(6, 6)
            for one in optimizers:
                one.zero_grad()
            fake = maker(noise)
            out = critic(fake if step % 2 else fake.detach())
            out.mean().backward()
            optimizers[step % 2].step()
            yield from (out, both(noise), *net.parameters())

    compare(two, program)


# --- what travels ---


def test_T5_nothing_but_inputs_and_losses_travels(two: Executor) -> None:
    """Neither weights nor gradients, of 4 MB, nor outputs with the loss inside."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 100))
    model = DataParallel(net, executor=two)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    losses = model.with_loss(nn.CrossEntropyLoss())
    x, y = torch.randn(8, 1000), torch.randint(0, 100, (8,))
    for step in range(4):
        if step == 1:
            before = carried(model), model.stats().state_bytes
        optimizer.zero_grad()
        losses(x, y).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    two.flush()
    assert carried(model) - before[0] < 3 * 2 * x.nbytes
    assert model.stats().state_bytes == before[1]
    assert net[0].weight.grad is not None


GRADIENTS: dict[str, Callable[[Any, Any], Any]] = {
    "a view": lambda net, grad: grad.view(-1)[:3].fill_(1.0),
    "zeros": lambda net, grad: grad.zero_(),
    "added": lambda net, grad: (net[0].weight.square().sum() + net[2].weight.sum()).backward(),
    "a view of zeros": lambda net, grad: (
        view := grad.view(-1),
        net.zero_grad(set_to_none=False),
        view.add_(1),
    ),
    "numpy": lambda net, grad: np.asarray(grad).fill(2.0),
    "dlpack": lambda net, grad: torch.from_dlpack(grad).mul_(2),
    "a function": lambda net, grad: grad.apply_(lambda value: value * 3),
    "shared": lambda net, grad: net.share_memory(),
    "data": lambda net, grad: setattr(grad, "data", grad.data * 2),
}


@pytest.mark.parametrize("what", GRADIENTS)
def test_T5_gradients_that_the_program_changes(what: str, two: Executor) -> None:
    """They travel with the step, whatever way the program took to their memory."""

    def program(model: Any, optimizer: Any) -> Any:
        for _ in range(2):
            advance(model, optimizer, 0)
            model(torch.ones(4, 6)).sum().backward()
            GRADIENTS[what](model.module, model.module[0].weight.grad)
            model(torch.ones(4, 6)).sum().backward()
            yield from [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.step()

    compare(two, program, close=True)


def test_T5_gradients_of_another_dtype(two: Executor) -> None:
    """They follow their parameters."""

    def program(model: Any, optimizer: Any) -> Any:
        model.module.double()
        model(torch.ones(4, 6).double()).sum().backward()
        yield from [p.grad for p in model.module.float().parameters()]
        optimizer.step()

    compare(two, program)


def test_T5_a_backward_that_reaches_no_parameter(two: Executor) -> None:
    """What has no gradient gets none by it, whatever was added up before."""

    def program(model: Any, optimizer: Any) -> Any:
        last, x = model.module[2].requires_grad_(False), torch.ones(4, 6, requires_grad=True)
        model(x).sum().backward()
        last.requires_grad_(True)
        model.run(lambda net, x: x * 2, x).sum().backward()
        yield torch.tensor([p.grad is None for p in last.parameters()])

    compare(two, program)


def test_T5_gradients_that_the_program_keeps(two: Executor) -> None:
    """They are those of their time, by whatever reads them."""

    def program(model: Any, optimizer: Any) -> Any:
        weight, x = model.module[0].weight, torch.ones(4, 6)
        model(x).sum().backward()
        first, view = weight.grad, weight.grad.view(-1)
        optimizer.zero_grad(set_to_none=False)
        seen = [view.clone()]
        optimizer.zero_grad()
        model(-x).sum().backward()
        second = weight.grad
        optimizer.step()
        seen += [first.clone(), second.clone(), torch.tensor(second.tolist())]
        seen += [torch.from_numpy(second.numpy()), copy.deepcopy(second), second.norm()]
        seen += [pickle.loads(pickle.dumps(second)), torch.tensor(float(second[0, 0]))]
        return seen

    compare(two, program)


@pytest.mark.timeout(60)
def test_T5_gradients_that_are_sent(two: Executor) -> None:
    """A message has the value, wherever it has one."""

    def program(model: Any, optimizer: Any) -> Any:
        net, x = model.module, torch.ones(4, 6)

        def grad() -> Any:
            optimizer.zero_grad()
            model(x).sum().backward()
            return net[0].weight.grad

        one = grad()
        yield model.run(lambda net, x: net(x) * one.sum(), x)
        two = grad()
        loss = model.with_loss(lambda out, _: out.mean() * two.sum(), reduction="mean")
        yield loss(x, x)
        for value in (grad(), [grad()]):
            net.last = value
            yield model(x)
            del net.last
        net.register_buffer("last", grad())
        yield model(x)
        del net.last
        yield model.call("forward", grad(), split=False)
        grad()
        model(x).backward(x @ grad().T @ net[2].weight.grad.T)
        yield net[0].weight.grad
        optimizer.param_groups[0]["own"] = grad()
        optimizer.step()

    compare(two, program)


def conv() -> nn.Module:
    return nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)


@made_of(first=(6, 512), square=(512, 512), last=(4, 3), conv=conv)
def wide(net: Any, x: Tensor) -> Tensor:
    """Gradients that are large, those of a layer that runs twice, and those that lie otherwise."""
    h = net.square(net.first(x)).relu()
    h = torch.utils.checkpoint.checkpoint(net.square, h, use_reentrant=True)
    return net.last(net.conv(h.view(-1, 2, 16, 16)).mean((2, 3)))


class Looking(torch.optim.SGD):
    """Keeps the last step's gradients as they are, to add them, and a number for all parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"]["t"] = self.state["all"].get("t", 0) + 1
        self.param_groups[0]["lr"] = 1e-3 / self.state["all"]["t"]
        for p in self.param_groups[0]["params"]:
            last, self.state[p]["last"] = self.state[p].get("last"), p.grad
            p.grad = p.grad if last is None else p.grad + last
        found = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.grad = self.state[p]["last"]
        return found


def test_T5_an_optimizer_that_keeps_what_it_was_given(two: Executor) -> None:
    """Sums lie where the last ones did, unless somebody looks at these."""

    def program(model: Any, optimizer: Any) -> Any:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(8, 6) * (step + 1)).square().sum()
            loss.backward()
            yield clipped(optimizer, 1e9)
            optimizer.step()
            if step == 2:
                yield torch.tensor(optimizer.state["all"]["t"])

    compare(two, program, wide, Looking, close=True, lr=1e-3)


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute and in a tensor of its group, which follow each other."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.calls, self.rates = 0, [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= 2
            group.setdefault("count", torch.zeros(()))

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.param_groups[0]["count"] += 1
        assert self.param_groups[0]["count"] == self.calls
        for p in self.param_groups[0]["params"]:
            p.grad *= self.rates[0] / (self.calls * getattr(p, "slower", 1))
        return super().step(closure)


def test_T3_what_an_optimizer_counts(killable: Executor) -> None:
    """It goes on after a death, after the state was read, and after the program has changed it."""

    def program(model: Any, optimizer: Any) -> Any:
        for step in range(8):
            if step == 2 and hasattr(optimizer, "grad_norm"):
                kill(killable, 1)
            if step == 5:
                optimizer.rates[0] *= 2
                model.module[0].weight.slower = 4
                assert optimizer.state_dict()["param_groups"][0]["count"] == 5
            assert step != 6 or len(optimizer.state) == 4
            yield advance(model, optimizer, step)

    compare(killable, program, layers, Counting, momentum=0.5)


@pytest.mark.parametrize("show", [lambda w: w, lambda w: w.T, lambda w: w[1:]])
def test_T5_an_attribute_in_the_memory_of_a_weight(show: Any, two: Executor) -> None:
    """It follows the steps of the replicas, also a part, and one that came later."""

    def make() -> nn.Module:
        net: Any = Apply(lambda net, x: net.layer(x) + net.alias.sum(), layer=nn.Linear(6, 2))
        net.alias = show(net.layer.weight.data)
        return net

    def program(model: Any, optimizer: Any) -> Any:
        for step in range(6):
            yield advance(model, optimizer, step)
            if step == 2:  # from here on each has its own
                model.module.layer.weight.data = model.module.layer.weight.data * 2
            if step == 3:
                model.module.alias = show(model.module.layer.weight.data)

    compare(two, program, make)


def test_T5_parameters_in_the_same_memory(two: Executor) -> None:
    """One that no optimizer has follows the steps; two that it has are refused."""

    def tied() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        net[2].weight.data = net[0].weight.data
        return net

    def pairs() -> nn.Module:
        net = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(3)])
        for layer in net:
            weight = layer.weight.detach()
            layer.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
        return net

    def program(model: Any, optimizer: Any) -> Any:
        for step in range(3):
            loss = advance(model, optimizer, step)
            yield getattr(loss, "a", loss)

    some = (torch.optim.SGD, lambda model: [model.module[0].weight])
    compare(two, program, tied, *some)
    with pytest.raises(ValueError, match="the same memory"):
        small(two, True, tied)
    compare(two, program, pairs, *some)
    compare(two, program, pairs, torch.optim.SGD, lambda model: model.parameters())


# --- deaths ---


def test_T2_a_newcomer_steps_with_the_program_s_settings(killable: Executor) -> None:
    """Those of the step, also where no forward has told them: new state has this dtype."""

    def program(model: Any, optimizer: Any) -> list[Tensor]:
        model(torch.ones(4, 6)).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)  # fetches all: nothing is made again
        kill(killable, 0)
        killable.flush()  # sees the death
        killable.grow()
        torch.set_default_dtype(torch.float64)
        try:
            optimizer.step()
            return [values["eta"] for values in optimizer.state_dict()["state"].values()]
        finally:
            torch.set_default_dtype(torch.float32)

    compare(killable, program, layers, torch.optim.ASGD, foreach=False)


def test_T2_a_death_between_a_step_and_zero_grad(killable: Executor) -> None:
    """Gradients of before are missed where they are used, and not where they are cleared."""
    for used in (False, True):
        killable.grow()
        model, optimizer = small(killable)
        advance(model, optimizer, 0)
        killable.flush()  # waits for the step
        kill(killable, 1)
        model(torch.ones(4, 6)).sum().backward()
        if used:
            assert isinstance(raised(optimizer.step), GraphLost)
        else:
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
        advance(model, optimizer, 1)


def test_T2_a_graph_that_is_made_again_elsewhere_is_freed_where_it_was(killable: Executor) -> None:
    """The first chunk's kept gradients go back to its own replica, and so does its graph."""
    model, optimizer = small(killable)
    advance(model, optimizer, 0)
    optimizer.zero_grad()
    kill(killable, 0)
    out = model(torch.ones(8, 6))
    out.sum().backward(retain_graph=True)
    killable.grow()
    model(torch.ones(8, 6)).sum().backward()
    del out
    assert [graphs for _, graphs in killable.flush()] == [0, 0]


def test_T2_a_death_after_weights_were_read(killable: Executor) -> None:
    """That fetches them, also into what lies in their memory, as the weight of spectral norm."""

    def program(model: Any, optimizer: Any) -> None:
        advance(model, optimizer, 0)
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.ones(4, 6)).sum().backward()
            if hasattr(optimizer, "grad_norm"):
                model.sync()
                killable.grow()
                kill(killable, 1)
        optimizer.step()

    compare(killable, program, lambda: spectral_norm(nn.Linear(6, 2)))


def test_T2_a_buffer_that_only_the_second_forward_writes_to(killable: Executor) -> None:
    """The first one finds again what it found."""

    def forward(net: Any, x: Tensor) -> Tensor:
        out: Tensor = net.layer(x) * net.scale.clone()
        if x[0, 0] > 1:
            net.scale += 1
        return out

    def program(model: Any, optimizer: Any) -> None:
        for value in (1.0, 2.0, 2.0):
            loss = model(torch.full((4, 6), value)).sum()
            if value == 2 and hasattr(optimizer, "grad_norm"):
                killable.grow()
                kill(killable, 1)
            loss.backward()
        optimizer.step()

    made = made_of(layer=(6, 2), scale=lambda: nn.Buffer(torch.ones(())))
    compare(killable, program, made(forward))


def test_T2_a_gradient_that_is_held_and_cannot_be_made_again(killable: Executor) -> None:
    """It is lost where it is used; the next backward does not mind. A traceback may hold it."""
    model, optimizer = small(killable)
    model(torch.ones(4, 6)).sum().backward()
    grad = model.module[0].weight.grad
    kill(killable, 1)
    nn.init.ones_(model.module[0].weight)
    optimizer.zero_grad()
    advance(model, optimizer, 0)
    assert isinstance(raised(grad.sum), StateLost)


@pytest.mark.parametrize("soon", [False, True])
def test_T2_a_newcomer_gets_the_steps_of_all_models(
    soon: bool, killable: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the next call of any, so that another death does not lose them."""
    lost = ReplicaSet.lost
    if soon:
        monkeypatch.setattr(ReplicaSet, "lost", lambda s, *how: (lost(s, *how), s.grow(60)))
    model, optimizer = small(killable)
    other, _ = small(killable, inside=False)
    for step in range(2):
        advance(model, optimizer, step)
    killable.flush()  # waits for the step
    for victim in range(2):
        kill(killable, victim)
        with contextlib.nullcontext() if soon else forked.held():
            other(torch.ones(4, 6))
        killable.grow()
        other(torch.ones(4, 6))
    plain, ordinary = small(killable, inside=False)
    for step in range(2):
        advance(plain, ordinary, step)
    assert same(held(model, optimizer), held(plain, ordinary))


EDITS = {
    "layer": "net[1] = nn.ReLU()",
    "group": "net.append(nn.Linear(2, 2)); optimizer.add_param_group({'params': net[3].weight})",
    "rate": "optimizer.param_groups[0]['lr'].mul_(0.5)",
    "gradient": "net[0].weight.grad.zero_()",
    "fewer parameters": "del optimizer.param_groups[0]['params'][0]",
}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_T2_a_death_in_the_step_before_an_edit(
    edit: str, resumed: bool, killable: Executor
) -> None:
    """The step is made again with the module, the groups and the gradients as they were."""
    results = []
    for deadly in (False, True):
        model, optimizer = small(killable, lr=torch.tensor(0.01))
        model(torch.ones(8, 6)).square().mean().backward()
        if resumed:
            assert optimizer.state_dict()  # which replicas get again before the step
        if edit == "gradient":  # which lies in this process
            model.module[0].weight.grad = model.module[0].weight.grad * 2
        with dying(killable, 2 * resumed, "before") if deadly else contextlib.nullcontext():
            optimizer.step()
        exec(EDITS[edit], {"net": model.module, "optimizer": optimizer, "nn": nn})
        found = [model(torch.ones(8, 6))]
        advance(model, optimizer, 1)
        results.append([*found, *[t.clone() for t in model.state_dict().values()]])
    assert same(*results)


def test_T2_a_death_after_a_layer_has_left(
    killable: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients of before the step are missed where they are used, and not by a forward."""
    model, optimizer = small(killable)
    advance(model, optimizer, 0)
    killable.flush()  # waits for the step
    last, model.module[2] = model.module[2], nn.Linear(8, 2)
    with dying(killable, 0, "before"):
        model(torch.ones(8, 6))
    assert isinstance(raised(last.weight.grad.sum), GraphLost)
    model, optimizer = small(killable)
    advance(model, optimizer, 1)
    model.sync()
    model.module[2] = nn.Linear(8, 2)
    optimizer.step()  # before a forward has seen it
    lost = ReplicaSet.lost
    monkeypatch.setattr(ReplicaSet, "lost", lambda s, *how: (lost(s, *how), s.grow(60)))
    with dying(killable, 0, "before"):
        found = model(torch.ones(8, 6))
    torch.testing.assert_close(found, model.module(torch.ones(8, 6)))


def test_T2_a_loader_that_uses_its_memory_again(killable: Executor) -> None:
    """A forward runs again with the rows that it had, for a step that is on its way."""

    def program(model: Any, optimizer: Any) -> None:
        memory = np.empty((8, 6), np.float32)
        for step in range(3):
            memory.fill(step + 1)
            optimizer.zero_grad()
            model(torch.from_numpy(memory)).square().mean().backward()
            deadly = step and hasattr(optimizer, "grad_norm")
            with dying(killable, 0, "sent") if deadly else contextlib.nullcontext():
                optimizer.step()

    compare(killable, program)


def test_T1_unused_parameters_have_no_gradient_if_that_is_asked(two: Executor) -> None:
    """Those that are used have theirs, which stay in the replicas."""
    net = nn.ModuleDict({"used": nn.Linear(3, 2), "other": nn.Linear(3, 2)})
    plain, x = copy.deepcopy(net), torch.randn(4, 3)
    model = DataParallel(net, executor=two, options=Options(unused_grads="none"))
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    ordinary = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        model.run(lambda net, x: net["used"](x), x).square().sum().backward()
        plain["used"](x).square().sum().backward()
        assert net["used"].weight.grad is not None and net["other"].weight.grad is None
        optimizer.step()
        ordinary.step()
    torch.testing.assert_close(net.state_dict(), plain.state_dict())


def test_T2_all_replicas_die(killable: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error counts the steps that are lost; training goes on from the last sync."""
    model, optimizer = small(killable)
    advance(model, optimizer, 0)
    model.sync()
    for step in (1, 2):
        advance(model, optimizer, step)
    with monkeypatch.context() as patch:
        patch.setattr(Starter, "start", lambda *_, **how: pytest.fail("none is needed"))
        killable.flush()  # waits for the step
        kill(killable, 0, 1)
        error = raised(model.sync)
        for slot in killable.replica_set.slots.values():
            slot.successor.join()  # else one that fails is taken for one that comes
    assert isinstance(error, StateLost) and "last 2 steps" in str(error)
    plain, ordinary = small(killable, inside=False)
    advance(plain, ordinary, 0)
    assert same(held(model, optimizer), held(plain, ordinary))
    advance(model, optimizer, 2)
    advance(plain, ordinary, 2)
    assert same(held(model, optimizer), held(plain, ordinary))
    killable.grow()


@pytest.mark.long
def test_T2_a_replica_that_stood_in_before(executors: Any) -> None:
    """It stands in again with the weights of now, also if the driver has them meanwhile."""
    executor = executors(3, name="killable")
    executor.grow()
    model = DataParallel(nn.Linear(6, 2), ["cpu", "cpu"], executor=executor)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        advance(model, optimizer, 0)
        model.sync()
        kill(executor, 1)
        for _ in range(2):  # the third one has no part in that which finds the other one dead
            out = model(torch.ones(4, 6))
        assert torch.equal(out[0], out[3])
        executor.grow()


# --- what the user's code sees ---


READERS: dict[str, Callable[[Any], list[Tensor]]] = {
    "state_dict": lambda model: [*model.state_dict().values()],
    "parameters": lambda model: [*model.module.parameters()],
    "deepcopy": lambda model: [*copy.deepcopy(model).parameters()],
    "pickle": lambda model: [*pickle.loads(pickle.dumps(model.module)).parameters()],
    "sync": lambda model: (model.sync(), [*model.parameters()])[1],
    "double": lambda model: [p.float() for p in model.module.double().parameters()],
    "average": lambda model: [*torch.optim.swa_utils.AveragedModel(model.module).parameters()],
    "numbers": lambda model: [torch.tensor(p.tolist()) for p in model.parameters()],
    "lists": lambda model: [*torch._foreach_add([*model.parameters()], 0.0)],
    "inference": torch.inference_mode()(lambda model: [p.clone() for p in model.parameters()]),
    "compiled": lambda model: (
        torch.compile(model.module, backend="eager")(torch.ones(4, 6)),
        [*model.parameters()],
    )[1],
}


@pytest.mark.parametrize("reader", READERS)
def test_T3_what_reads_the_master_syncs(reader: str, two: Executor) -> None:
    """Once, and then the statistics say that the master is not behind."""
    plain, ordinary = small(two, inside=False)
    model, optimizer = small(two)
    for step in range(3):
        advance(plain, ordinary, step)
        advance(model, optimizer, step)
    assert model.stats().steps_behind == 3
    assert same([t.detach() for t in READERS[reader](model)], [*plain.parameters()])
    assert model.stats().steps_behind == 0 and type(model.module[0].weight) is nn.Parameter


def test_T3_closing_the_executor_syncs() -> None:
    """It brings gradients, too. The optimizer is of no use afterwards."""
    results = []
    for inside in (False, True):
        with Executor(["cpu"] * 2) as executor:
            model, optimizer = small(executor, inside)
            advance(model, optimizer, 0)
        results.append([*model.parameters(), *[p.grad for p in model.parameters()]])
    assert same(*results)
    assert "make optimizers anew" in str(raised(optimizer.step))


class Own(nn.Parameter):
    """A parameter that fetches nothing by itself."""


def test_T3_a_parameter_of_another_class(two: Executor) -> None:
    """Its values come with each step."""

    def make() -> nn.Module:
        net = layers()
        net[0].weight = Own(net[0].weight.detach())
        return net

    def program(model: Any, optimizer: Any) -> Any:
        for step in range(2):
            advance(model, optimizer, step)
            yield model.module[0].weight

    compare(two, program, make)


def test_T3_another_name_of_a_weight(two: Executor) -> None:
    """It has the values of the last fetch, and what is written there is overwritten."""

    def program(model: Any, optimizer: Any) -> None:
        alias = model.module[0].weight.detach()
        for step in range(2):
            advance(model, optimizer, step)
            alias.mul_(0 if hasattr(optimizer, "grad_norm") else 1)

    compare(two, program)


def test_T3_parameters_that_leave(two: Executor) -> None:
    """They keep their gradients and moments, and are trained again where they come back."""

    def program(model: Any, optimizer: Any) -> None:
        group, state, bias = optimizer.param_groups[0], optimizer.state, model.module[0].bias
        every = group["params"]
        for step, group["params"] in enumerate([every, every[:2], every, every[1:], every]):
            advance(model, optimizer, step)
        assert optimizer.state[bias] is state[bias]

    compare(two, program)


@made_of(body=lambda: nn.Linear(6, 8).double(), head=(8, 2))
def mixed(net: Any, x: Tensor) -> Tensor:
    """Weights of two dtypes."""
    return net.head(net.body(x.double()).float())


def test_T3_an_optimizer_that_another_one_has_followed(two: Executor) -> None:
    """It says so, with two dtypes; the other one goes on, and a model ends with its last user."""
    results = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = DataParallel(mixed(), executor=two)
        net: Any = model.module
        kind = torch.optim.SGD
        first = optimizer_of(model, inside, kind, net.body.parameters(), lr=0.1, momentum=0.9)
        advance(model, first, 0)
        first.param_groups[0]["params"].append(net.head.weight)
        advance(model, first, 1)
        second = optimizer_of(model, inside, kind, lr=0.1)
        second.add_param_group({"params": []})
        advance(model, second, 2)
        del second.param_groups[-1]
        if inside:
            for use in (first.step, first.grad_norm):
                assert "called again for its parameters" in str(raised(use))
            assert type(pickle.loads(pickle.dumps(second))) is kind
        advance(model, second, 3)
        results.append([t.clone() for t in model.state_dict().values()])
        gone = weakref.ref(net)
        del model, net, first, second
        gc.collect()
        assert gone() is None
    assert same(*results)


def test_T3_a_rate_that_changes_and_changes_back(two: Executor) -> None:
    """Replicas that get all in between have that of the last step, and what lists got."""

    def program(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["betas"] = betas = [*optimizer.param_groups[0]["betas"]]
        advance(model, optimizer, 0)
        optimizer.param_groups[0]["lr"] = 0.1
        assert optimizer.state  # which goes to the replicas again
        model(torch.ones(8, 6))
        optimizer.param_groups[0]["lr"] = 0.01
        betas[0] *= 0.5
        advance(model, optimizer, 1)

    for kind in float, torch.tensor:
        compare(two, program, betas=(kind(0.9), kind(0.99)), foreach=False)


def test_T3_a_parameter_that_is_trained_here_again(two: Executor) -> None:
    """The next optimizer leaves it out: a change here is sent once, and forward may write to it."""
    net = nn.Linear(6, 4)
    model = DataParallel(net, executor=two)
    advance(model, model.optimizer(torch.optim.SGD, lr=0.1), 0)
    model.optimizer(torch.optim.SGD, [net.weight], lr=0.1)
    own = torch.optim.SGD([net.bias], lr=0.1)
    reruns = two.stats().reruns
    for _ in range(2):
        model(torch.ones(4, 6)).sum().backward()
        own.step()
    assert two.stats().reruns == reruns

    @torch.no_grad()
    def write(net: nn.Linear, x: Tensor) -> Tensor:
        net.bias.add_(1)
        return net(x)

    before = net.bias.detach().clone()
    model.run(write, torch.ones(4, 6))
    assert torch.equal(net.bias, before + 1)


def test_T3_the_scaler(two: Executor) -> None:
    """Torch's gradient scaler, with an overflow on the way."""

    def program(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            factor = torch.inf if step == 2 else 1.0
            scaler.scale(model(torch.ones(4, 6) * step).square().sum() * factor).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    compare(two, program, behind=3)  # nothing was fetched


def test_T3_other_wrappers(two: Executor, killable: Executor) -> None:
    """Of the module, of a part of it, in place and on another executor see all steps."""
    model, optimizer = small(two)
    net: Any = model.module
    advance(model, optimizer, 0)
    x = torch.ones(4, 6)
    out = model(x)
    assert torch.equal(DataParallel(net, executor=two)(x), out)
    assert torch.equal(DataParallel(net, ["cpu"])(x), out)
    advance(model, optimizer, 1)
    part = DataParallel(net[:1], executor=killable)
    torch.testing.assert_close(part(x), net[:1](x))
    assert model.stats().steps_behind == 0
    plain, ordinary = small(two, inside=False)
    for step in range(2):
        advance(plain, ordinary, step)
    for one in (model, plain):
        advance(one, torch.optim.SGD(one.parameters(), lr=0.1), 2)
    assert same([*model.parameters()], [*plain.parameters()])


def normed() -> nn.Module:
    """Make a net with synchronised batch norm."""
    return convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))


def test_T3_synchronised_batch_norm(two: Executor) -> None:
    """The step and the layers use one group."""
    compare(two, lambda *both: [advance(*both, step) for step in range(3)], normed, torch.optim.SGD)


def test_T2_a_step_that_cannot_be_made_again(killable: Executor) -> None:
    """It is said as a step that is lost, with the next call."""
    model, optimizer = small(killable, make=normed)
    model(torch.ones(8, 6)).sum().backward()
    model.module[0].weight.grad.sum()  # replicas have made what they need
    with dying(killable, 1, "before"):
        optimizer.step()
    error = raised(lambda: model(torch.ones(8, 6)))
    assert isinstance(error, StateLost) and "repeat that step" in str(error)
    advance(model, optimizer, 1)


# --- what is refused ---


@made_of(weight=ones(6))
def meddler(net: Any, x: Tensor) -> Tensor:
    """Writes to its weights in forward, when its input is negative."""
    if x.sum() < 0:
        net.weight.data.clamp_(max=0.5)
    return x * net.weight


def test_T4_a_copy_of_a_fused_optimizer_steps_where_its_weights_are(two: Executor) -> None:
    """It is an ordinary one, of which torch wants the count of steps there, too."""
    model, optimizer = small(two, fused=True)
    advance(model, optimizer, 0)
    net, own = copy.deepcopy((model.module, optimizer))
    net(torch.ones(4, 6)).sum().backward()
    own.step()


def test_T4_a_forward_that_writes_to_what_is_trained(two: Executor) -> None:
    """It is refused, and no replica goes on with what it wrote."""
    model = DataParallel(meddler(), executor=two)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    error = raised(lambda: model(-torch.ones(4, 6)))
    assert "an optimizer in the replicas steps" in str(error)
    assert torch.equal(model(torch.ones(4, 6)), torch.ones(4, 6))
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    assert torch.equal(model.module.weight, torch.full((6,), 0.6))


class Failing(torch.optim.SGD):
    """Raises an exception in its second step."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["made"] = self.param_groups[0].get("made", 0) + 1
        if self.param_groups[0]["made"] == 2:
            raise ArithmeticError("no second step")
        return super().step(closure)


class Curious(Failing):
    """Differentiates gradients in its second step, as optimizers of second order do."""

    @torch.enable_grad()
    def step(self, closure: Any = None) -> Any:
        with contextlib.suppress(ArithmeticError):
            return super().step(closure)
        weight = self.param_groups[0]["params"][0]
        return torch.autograd.grad(weight.grad.sum(), weight)


@pytest.mark.parametrize(
    ("kind", "text"), [(Failing, "no second step"), (Curious, "differentiates the gradients")]
)
def test_T4_a_step_that_fails(kind: Any, text: str, two: Executor) -> None:
    """Its exception comes once, with the next call; what it counts in its groups comes back."""
    model = DataParallel(nn.Linear(6, 2), executor=two)
    optimizer = model.optimizer(kind, lr=0.1)
    advance(model, optimizer, 0)
    advance(model, optimizer, 1)
    assert text in str(raised(lambda: model(torch.ones(4, 6))))
    advance(model, optimizer, 2)
    model.sync()
    assert optimizer.param_groups[0]["made"] == 3


class FailsOnce(torch.optim.SGD):
    """Raises an exception in one replica."""

    def step(self, closure: Any = None) -> Any:
        try:
            os.unlink(os.path.join(self.param_groups[0]["folder"], "fail"))
        except FileNotFoundError:
            return super().step(closure)
        raise ArithmeticError("in one of them")


def test_T4_a_step_that_fails_in_one_replica(two: Executor, tmp_path: Path) -> None:
    """It takes the step over from the other one."""
    model = DataParallel(nn.Linear(6, 2), executor=two)
    params = [{"params": [*model.parameters()], "folder": str(tmp_path)}]
    optimizer = model.optimizer(FailsOnce, params, lr=0.1)
    (tmp_path / "fail").touch()
    advance(model, optimizer, 0)
    assert isinstance(raised(lambda: model(torch.ones(4, 6))), ArithmeticError)
    out = model(torch.ones(4, 6))
    assert torch.equal(out[0], out[3])


def test_T4_nonsense(two: Executor) -> None:
    """Each is an error that says what to do."""
    model = DataParallel(nn.Linear(2, 2), executor=two)
    sgd = torch.optim.SGD
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: model.optimizer(torch.optim.LBFGS), TypeError, "runs the model many times"),
        (lambda: model.optimizer(nn.Linear, lr=1), TypeError, "a class of"),  # type: ignore[arg-type]
        (lambda: model.optimizer(sgd, nn.Linear(2, 2).parameters(), lr=1), ValueError, "model's"),
        (lambda: model.optimizer(sgd, [], lr=1), ValueError, "empty"),
        (lambda: model.optimizer(sgd, lr=-1), ValueError, "learning rate"),
        (lambda: model.optimizer(sgd, lr=1, gradient=2), TypeError, "gradient"),
    ]
    for call, kind, text in calls:
        error = raised(call)
        assert isinstance(error, kind) and text in str(error), error
    model(torch.ones(4, 2)).sum().backward()  # nothing of these is left
    assert type(model.module.weight.grad) is Tensor


@pytest.mark.timeout(60)
def test_T1_complex_parameters_are_trained(two: Executor) -> None:
    """Their gradients come to the driver: groups carry none."""

    def net() -> nn.Module:
        return nn.ParameterList([torch.randn(4, dtype=torch.complex64)])

    def program(model: Any, optimizer: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model.run(lambda one, rows: (rows * one[0]).abs(), torch.randn(4, 4)).mean().backward()
            optimizer.step()

    compare(two, program, net, torch.optim.SGD)
