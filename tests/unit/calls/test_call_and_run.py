"""`DataParallel.call` and `run`: any method of the module, and any function of it, on the replicas.

They are compared with the plain module, on one and two replicas.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import assert_same_grads, assert_same_state, raised
from mortal import Everything, arm, armed, fate, rows, same, state
from torch import Tensor, nn

from raydp_parallel import (
    DataParallel,
    Executor,
    Options,
    StateChanged,
    TransferError,
    cluster,
)

ONE, TWO = ["cpu"], ["cpu", "cpu"]


class Parts(NamedTuple):
    """What `Net.nested` gives.

    Attributes:
        hidden: What the encoder gives.
        others: Results of other kinds.
    """

    hidden: Tensor
    others: dict[str, Any]


class Net(nn.Module):
    """A module with more methods than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.decoder = nn.Linear(4, 2)
        self.calls = 0
        self.history: list[int] = []
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).tanh())

    def generate(
        self, x: Tensor, shift: Tensor | None = None, *, steps: int = 1, method: str = "sum"
    ) -> Tensor:
        """Several forwards, one after the other."""
        for _ in range(steps):
            out = self(x)
            x = torch.cat([out, x[:, :1]], 1)
        x = x if shift is None else x + shift
        return x.sum(1, keepdim=True) if method == "sum" else x

    def nested(self, x: Tensor) -> Parts:
        """Tensors in several containers."""
        hidden = self.encoder(x)
        return Parts(hidden, {"square": (hidden.square(), None), "rows": len(x)})

    def count(self, x: Tensor) -> None:
        """Writes to a buffer in place, and rebinds and changes attributes."""
        self.total += self.encoder(x).detach().sum(0)
        self.calls += 1
        self.history.append(len(x))

    def size(self, x: Tensor) -> int:
        """No tensor."""
        return len(x)

    def ragged(self, x: Tensor) -> Tensor:
        """As many columns as there are rows."""
        return self.encoder(x)[:, :1].expand(-1, len(x))

    def noisy(self, x: Tensor) -> Tensor:
        """Random numbers."""
        return torch.dropout(self.encoder(x), 0.5, True)

    def where(self) -> int:
        """The process."""
        return os.getpid()

    def fail(self, x: Tensor) -> Tensor:
        """Raises."""
        raise ValueError(f"no {len(x)} rows")


class Mortal(nn.Module):
    """Its process may end in a method; the first column says which chunk it is."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.body = Everything(checkpointed=True)
        self.folder = str(folder)

    def train_on(self, x: Tensor, *, scale: float) -> Tensor:
        """What may be interrupted, and its backward."""
        chunk, folder = int(x[0, 0]), self.folder
        fate(folder, f"call {chunk}")
        out: Tensor = self.body(x[:, 1:]) * scale
        out.register_hook(lambda _: fate(folder, f"backward {chunk}"))
        return out


@pytest.fixture(params=[ONE, TWO], ids=["one", "two"])
def pair(request: pytest.FixtureRequest, two: Executor) -> tuple[Any, Net]:
    """A wrapped net in double precision, and a plain copy of it."""
    net = Net().double()
    return DataParallel(net, request.param, executor=two), copy.deepcopy(net)


@pytest.fixture
def model(two: Executor) -> Any:
    """A net on two devices."""
    return DataParallel(Net().double(), executor=two)


def batch(count: int = 6) -> Tensor:
    """Some rows."""
    return torch.randn(count, 3, dtype=torch.double)


def close(one: Any, other: Any) -> None:
    """Equal but for the order of sums."""
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# --- call ---


def test_a_method_gives_what_the_plain_one_gives(pair: tuple[Any, Net]) -> None:
    """Values and gradients, of weights and of arguments; positional and keyword arguments, tensors
    and others.
    """
    model, plain = pair
    x, shift = batch(), batch()
    for net, generate in ((model, functools.partial(model.call, "generate")), (plain, None)):
        ours, moved = x.clone().requires_grad_(), shift.clone().requires_grad_()
        out = (generate or plain.generate)(ours, shift=moved, steps=3, method="none")
        out.square().sum().backward()
        if net is model:
            first = out.detach(), ours.grad, moved.grad
        else:
            close(first, (out.detach(), ours.grad, moved.grad))
    assert_same_grads(model, plain, rtol=1e-9, atol=1e-9)


def test_derivatives_of_second_order(pair: tuple[Any, Net]) -> None:
    """A penalty on a gradient."""
    model, plain = pair
    x = batch().requires_grad_()
    for call in (functools.partial(model.call, "generate"), plain.generate):
        (slope,) = torch.autograd.grad(call(x, steps=2).sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert_same_grads(model, plain, rtol=1e-9, atol=1e-9)


def test_nested_outputs(pair: tuple[Any, Net]) -> None:
    """Containers are gathered as those of forward are; what is no tensor is a list."""
    model, plain = pair
    x = batch()
    found, expected = model.call("nested", x), plain.nested(x)
    assert type(found) is Parts
    close(found.hidden, expected.hidden)
    close(found.others["square"][0], expected.others["square"][0])
    assert found.others["square"][1] is None
    assert found.others["rows"] == (6 if len(model.device_ids) == 1 else [3, 3])


def test_calling_forward_is_forward_without_hooks(pair: tuple[Any, Net]) -> None:
    """As in one process: hooks belong to the call of a module, and submodules have theirs."""
    model, plain = pair
    x = batch()
    for net in (model.module, plain):
        net.register_forward_hook(_doubled)
        net.encoder.register_forward_hook(_doubled)
    close(model.call("forward", x), plain.forward(x))
    close(model(x), plain(x))
    close(model.call("__call__", x), plain(x))
    close(model.call("encoder", x), plain.encoder(x))
    assert not torch.allclose(plain(x), plain.forward(x))


def _doubled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_writes_are_those_of_a_forward(pair: tuple[Any, Net]) -> None:
    """With one device all stays, with two what chunk 0 wrote in place."""
    model, plain = pair
    x = batch()
    assert model.call("count", x) is None
    if len(model.device_ids) == 1:
        plain.count(x)
        assert (model.module.calls, model.module.history) == (1, [6])
    else:
        plain.total += plain.encoder(x[:3]).detach().sum(0)
        assert (model.module.calls, model.module.history) == (0, [])
    assert_same_state(model, plain, rtol=1e-9, atol=1e-9)


def test_random_numbers_are_those_of_a_forward(model: Any) -> None:
    """Each chunk has its own, and they follow from the seed."""
    found = []
    x = batch(3).repeat(2, 1)
    for run in (
        lambda: model.call("noisy", x),
        lambda: model.run(Net.noisy, x),
        lambda: model.call("noisy", x),
    ):
        torch.manual_seed(3)
        found.append(run())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not torch.equal(found[0][:3], found[0][3:])


def test_edits_of_the_master_are_seen(pair: tuple[Any, Net]) -> None:
    """Weights and attributes, and a method that is set on the object."""
    model, plain = pair
    x = batch()
    for net in (model.module, plain):
        with torch.no_grad():
            net.encoder.weight.mul_(2)
        net.factor = 3.0
        net.scaled = functools.partial(_scaled, net)
    close(model.call("scaled", x), plain.scaled(x))
    for net in (model.module, plain):
        net.factor = 4.0
    close(model.call("scaled", x), plain.scaled(x))


def _scaled(net: Any, x: Tensor) -> Tensor:
    out: Tensor = net.encoder(x) * net.factor
    return out


def test_captured_outputs(pair: tuple[Any, Net]) -> None:
    """Those of submodules, however they came to run."""
    model, plain = pair
    x = batch()
    with model.capture("encoder") as captured:
        model.call("generate", x)
    close(captured["encoder"], plain.encoder(x))


def test_without_gradients(pair: tuple[Any, Net]) -> None:
    """No graph is kept."""
    model, plain = pair
    x = batch()
    gc.collect()
    before = [graphs for _, graphs in model.executor.flush()]
    with torch.no_grad():
        out = model.call("generate", x)
    assert not out.requires_grad
    close(out, plain.generate(x).detach())
    gc.collect()
    assert [graphs for _, graphs in model.executor.flush()] == before


# --- split and gather ---


def test_arguments_that_are_not_split(two: Executor) -> None:
    """One replica computes all, as with one device: what the plain module gives, and what it does
    to the module stays.
    """
    net = Net().double()
    model, plain = DataParallel(net, executor=two), copy.deepcopy(net)
    x = batch()
    assert model.call("size", x) == [3, 3]
    assert model.call("size", x, split=False) == 6
    assert model.call("size", x, split=False, gather=False) == [6]
    assert model.call("where", split=False) != os.getpid()
    model.call("count", x, split=False)
    plain.count(x)
    assert (net.calls, net.history) == (plain.calls, plain.history) == (1, [6])
    out = model.call("generate", x, split=False, steps=2)
    close(out, plain.generate(x, steps=2))
    out.sum().backward()
    plain.generate(x, steps=2).sum().backward()
    assert_same_grads(model, plain, rtol=1e-9, atol=1e-9)
    assert_same_state(model, plain, rtol=1e-9, atol=1e-9)


def test_outputs_that_are_not_gathered(pair: tuple[Any, Net]) -> None:
    """A list with each chunk's, which may have shapes of their own; differentiable."""
    model, plain = pair
    x = batch(5)
    found = model.call("ragged", x, gather=False)
    expected = [plain.ragged(part) for part in x.chunk(len(model.device_ids))]
    assert type(found) is list and len(found) == len(model.device_ids)
    close(found, expected)
    sum(out.square().sum() for out in found).backward()
    sum(out.square().sum() for out in expected).backward()
    for name in ("weight", "bias"):
        ours, theirs = getattr(model.module.encoder, name), getattr(plain.encoder, name)
        close(ours.grad, theirs.grad)


def test_fewer_rows_than_devices(model: Any) -> None:
    """One chunk, as a forward makes it; and without any argument one replica is asked."""
    assert model.call("size", batch(1)) == [1]
    assert model.call("size", batch(1), gather=False) == [1]
    assert len(model.call("where")) == 1


def test_keywords_of_the_method_with_names_of_ours(model: Any) -> None:
    """Names of parameters before the star are free; `run` reaches the two that are not."""
    x = batch()
    out = model.call("generate", x, method="none")
    assert out.shape == (6, 3)
    found = model.run(lambda net, x: takes(net, x, split=3, function=1, gather=2), x)
    close(found, x + 6)


def takes(_net: nn.Module, x: Tensor, *, split: int, function: int, gather: int) -> Tensor:
    """A function with names that `run` has too."""
    return x + split + function + gather


# --- run ---


def importable(net: Any, x: Tensor, power: int = 2) -> Tensor:
    """A function that replicas import."""
    out: Tensor = net.encoder(x) ** power
    return out


MAIN = """
import torch

FACTOR = 3.0

def helper(x):
    return x * FACTOR

def function(net, x):
    return helper(net.encoder(x)).square() + torch.ones(())
"""


def of_main() -> Callable[..., Tensor]:
    """A function of a program, which cannot be imported."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(MAIN, scope)
    return scope["function"]  # type: ignore[no-any-return]


def nested() -> Callable[..., Tensor]:
    """A function inside of another one."""
    factor = 2.5

    def inner(net: Any, x: Tensor) -> Tensor:
        out: Tensor = importable(net, x) * factor
        return out

    return inner


class Loss:
    """An object that can be called."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, net: Any, x: Tensor) -> Tensor:
        out: Tensor = net(x).square() * self.factor
        return out


@pytest.mark.parametrize(
    "function",
    [
        importable,
        functools.partial(importable, power=3),
        lambda net, x: net(x).exp(),
        nested(),
        of_main(),
        Net.generate,
        Loss(0.5),
    ],
    ids=["importable", "partial", "lambda", "nested", "main", "method", "object"],
)
def test_a_function_gives_what_it_gives_here(
    pair: tuple[Any, Net], function: Callable[..., Tensor]
) -> None:
    """By name and with its code; values and gradients."""
    model, plain = pair
    x = batch()
    found, expected = model.run(function, x), function(plain, x)
    close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in plain.named_parameters():
        grad = model.module.get_parameter(name).grad
        if parameter.grad is None and len(model.device_ids) == 1:
            assert grad is None
        else:  # row B3: with two devices what was not used gets zeros
            close(torch.zeros_like(grad) if parameter.grad is None else parameter.grad, grad)


def test_a_function_that_closes_over_tensors(pair: tuple[Any, Net]) -> None:
    """Each goes whole to every replica, and gets the sum of the chunks' gradients; a weight of the
    module counts once.
    """
    model, plain = pair
    x, fixed = batch(), torch.full((4,), 2.0, dtype=torch.double)
    found = []
    for net, run in ((model.module, model.run), (plain, functools.partial(_here, plain))):
        scale = torch.arange(1.0, 5.0, dtype=torch.double).requires_grad_()
        weight = net.encoder.bias
        out = run(lambda net, x, s=scale, w=weight: net.encoder(x) * s * w + fixed, x)
        out.square().sum().backward()
        found.append((out.detach(), scale.grad, weight.grad, net.encoder.weight.grad))
    close(*found)


def _here(net: nn.Module, function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(net, *args)


def test_a_function_with_a_module_of_its_own(pair: tuple[Any, Net]) -> None:
    """A criterion with weights, which train too."""
    model, plain = pair
    x, head = batch(), nn.Linear(2, 1).double()
    twin = copy.deepcopy(head)
    out = model.run(lambda net, x: head(net(x)), x)
    close(out, twin(plain(x)))
    out.square().sum().backward()
    twin(plain(x)).square().sum().backward()
    assert_same_grads(head, twin, rtol=1e-9, atol=1e-9)
    assert_same_grads(model, plain, rtol=1e-9, atol=1e-9)


def test_what_a_function_changes(model: Any) -> None:
    """The master in place, as forward would; objects that it closes over not."""
    seen: list[int] = []

    def function(net: Any, x: Tensor) -> Tensor:
        seen.append(len(x))
        net.total.fill_(float(len(x)))
        return x

    model.run(function, batch(5))
    assert seen == []
    assert torch.equal(model.module.total, torch.full((4,), 3.0, dtype=torch.double))


LATER = """
FACTOR = {factor}

def function(net, x):
    return net.encoder(x) * 0 + FACTOR
"""


def test_a_function_of_a_module_that_was_loaded_later(
    two: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the replicas got the model: they run the driver's source of it all the same, and that
    of its namesake, loaded later still.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    model = DataParallel(Net(), executor=two)
    x = torch.ones(4, 3)
    model(x)
    for folder, factor in (("one", 2.0), ("two", 5.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "loaded_later.py").write_text(LATER.format(factor=factor))
        sys.path.insert(0, str(tmp_path / folder))
        sys.modules.pop("loaded_later", None)
        importlib.invalidate_caches()
        function = importlib.import_module("loaded_later").function
        assert model.run(function, x).unique().tolist() == [factor]
        assert model.run(functools.partial(function), x=x).unique().tolist() == [factor]
    del sys.modules["loaded_later"]


@pytest.mark.long
def test_generation_of_text(two: Executor) -> None:
    """`generate` of transformers on both replicas, and its config through the wrapper
    (transformers #6821).
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, eos_token_id=31
    )
    net = transformers.GPT2LMHeadModel(config).eval()
    model = DataParallel(net, executor=two, options=Options(passthrough=True))
    ids = torch.arange(12).view(4, 3)
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **how)
    assert torch.equal(model.call("generate", ids, attention_mask=mask, **how), expected)
    assert model.config is net.config


# --- errors ---


def test_an_exception_of_a_method(pair: tuple[Any, Net]) -> None:
    """With two devices upstream's words around it; always the traceback of the replica."""
    model, _ = pair
    for call in (
        lambda: model.call("fail", batch()),
        lambda: model.run(lambda net, x: net.fail(x), batch()),
    ):
        error = raised(call)
        assert isinstance(error, ValueError)
        if len(model.device_ids) == 1:
            assert str(error) == "no 6 rows" and "in fail" in str(error.__cause__)
        else:
            text = str(error)
            assert text.startswith("Caught ValueError in replica 0 on device cpu.")
            assert "in fail" in text and "no 3 rows" in text
    close(model(batch(2)).shape, (2, 2))


def test_what_cannot_be_called(pair: tuple[Any, Net]) -> None:
    """It is named, before anything is sent."""
    model, _ = pair
    before = model.stats().forwards
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
        model.call("absent", batch())
    with pytest.raises(TypeError, match=r"Net\.calls is not a method"):
        model.call("calls")
    with pytest.raises(TypeError, match="name of a method, got function"):
        model.call(importable, batch())
    for bad in (None, 3, "generate"):
        with pytest.raises(TypeError, match=f"takes the module first, got {type(bad).__name__}"):
            model.run(bad, batch())
    with pytest.raises(TypeError, match=r"generate is bound .* call\(\)"):
        model.run(model.module.generate, batch())
    assert model.stats().forwards == before


class NotBack:
    """Pickles; loading it raises."""

    def __setstate__(self, _state: object) -> None:
        raise LookupError("gone")

    def __call__(self, net: Any, x: Tensor) -> Tensor:
        out: Tensor = net(x)
        return out


def test_a_function_that_cannot_be_sent(pair: tuple[Any, Net]) -> None:
    """The error names it, and not the arguments."""
    model, _ = pair
    lock = threading.Lock()
    with pytest.raises(TransferError, match=r"^function is a builtins.function, which cannot"):
        model.run(lambda net, x: net(x) if lock else x, batch())
    with pytest.raises(TransferError, match=r"^inputs\[0\] is a _thread.lock, which cannot"):
        model.run(importable, lock)
    bad = NotBack()
    bad.state = 1  # type: ignore[attr-defined]
    with pytest.raises(TransferError, match=r"^function is a .*NotBack, which can be pickled"):
        model.run(bad, batch())


# --- deaths ---


@pytest.mark.parametrize(
    ("verb", "deaths"),
    [
        ("call", ["backward 0"]),
        pytest.param("call", ["call 1", "backward 0"], marks=pytest.mark.long),
        pytest.param("run", ["call 1", "backward 0"], marks=pytest.mark.long),
    ],
)
def test_a_death(verb: str, deaths: list[str], killable: Executor, tmp_path: Path) -> None:
    """In the method, and in its backward, where the graph is made again: the bits of an undisturbed
    run.
    """
    found: list[list[torch.Tensor]] = []
    for moments in ([], deaths):
        arm(tmp_path, *moments)
        torch.manual_seed(5)
        model = DataParallel(Mortal(tmp_path).double(), executor=killable)
        x = rows(2, 1).double().requires_grad_()
        scale = torch.tensor(3.0, dtype=torch.double, requires_grad=True)
        if verb == "call":
            out = model.call("train_on", x, scale=scale)
        else:
            out = model.run(lambda net, x, s=scale: net.train_on(x, scale=s), x)
        out.square().sum().backward()
        assert x.grad is not None and scale.grad is not None
        found.append([out.detach(), x.grad, scale.grad, *state(model)])
        assert armed(tmp_path) == []
    assert same(*found)


@pytest.mark.long
def test_a_death_after_a_tensor_of_the_function_was_changed(
    killable: Executor, tmp_path: Path
) -> None:
    """The graph cannot be made again, and that is said."""
    model = DataParallel(Mortal(tmp_path), executor=killable)
    scale = torch.tensor(3.0)
    out = model.run(lambda net, x: net.train_on(x, scale=scale), rows(2, 1))
    scale += 1
    arm(tmp_path, "backward 0")
    with pytest.raises(StateChanged, match="arguments were written to"):
        out.sum().backward()


# --- other ways to run ---


def test_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without devices the module itself runs, with the very objects."""
    monkeypatch.setattr(cluster, "all_gpus", lambda _options: [])
    model = DataParallel(Net())
    assert model.device_ids == []
    x = torch.randn(4, 3)
    seen: list[Any] = []
    assert torch.equal(model.call("generate", x, steps=2), model.module.generate(x, steps=2))
    assert model.run(lambda net, x: seen.append((net, x)), x) is None
    assert seen[0][0] is model.module and seen[0][1] is x
    assert model.call("size", x) == model.call("size", x, split=False) == 4
    assert model.call("size", x, gather=False) == [4]
    with model.capture("encoder") as captured:
        model.call("nested", x)
    assert torch.equal(captured["encoder"], model.module.encoder(x))
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
        model.call("absent")


def test_replicas_in_the_process_of_the_driver() -> None:
    """`Options(in_process=True)`: chunks one after the other, on copies."""
    with Executor(TWO, options=Options(in_process=True, threads=1)) as executor:
        model, x = DataParallel(Net().double(), executor=executor), batch(4)
        close(model.call("generate", x, steps=2), model.module.generate(x, steps=2))
        seen: list[int] = []
        out = model.run(lambda net, x: (seen.append(len(x)), net(x))[1], x)
        close(out, model.module(x))
        out.sum().backward()
        assert seen == [] and model.module.encoder.weight.grad is not None
        assert model.call("where") == [os.getpid()]


class Outer(nn.Module):
    """Holds a wrapper, and calls a method through it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def through(self, x: Tensor) -> Tensor:
        """A method, a function, and chunks that are not gathered."""
        (listed,) = self.inner.call("generate", x, gather=False)
        out: Tensor = self.inner.run(importable, x) + listed
        return out


def test_a_wrapper_inside_of_the_module(model: Any) -> None:
    """In a replica it runs in place, there too."""
    outer = DataParallel(Outer(model), executor=model.executor)
    x, net = batch(), model.module
    out = outer.call("through", x)
    close(out, importable(net, x) + net.generate(x))
    out.sum().backward()
    ours = net.encoder.weight.grad.clone()
    net.zero_grad()
    (importable(net, x) + net.generate(x)).sum().backward()
    close(ours, net.encoder.weight.grad)


class Lists(DataParallel[Any]):
    """A subclass that takes a list of tensors, and returns lists."""

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """One list for each device."""
        chunks = [torch.cat(inputs[0][k :: len(device_ids)]) for k in range(len(device_ids))]
        return [(chunk,) for chunk in chunks], [kwargs] * len(chunks)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """As they are."""
        return tuple(outputs)


def test_methods_that_subclasses_override(two: Executor) -> None:
    """They see what is called as they see a forward."""
    model = Lists(Net().double(), executor=two)
    parts = [batch(2), batch(1), batch(3)]
    first, second = model.call("generate", parts, steps=2)
    close(first, model.module.generate(torch.cat([parts[0], parts[2]]), steps=2))
    close(second, model.module.generate(parts[1], steps=2))
    found = model.run(importable, parts, gather=False)
    close(found[1], importable(model.module, parts[1]))


class Strange(DataParallel[Any]):
    """A subclass with replicas of its own."""

    def replicate(self, module: nn.Module, device_ids: Any) -> list[Any]:
        """The module itself, for each device."""
        return [module for _ in device_ids]


def test_replicas_that_cannot_be_asked(two: Executor) -> None:
    """Their forward would run instead, in silence."""
    model = Strange(Net().double(), executor=two)
    with pytest.raises(TypeError, match=r"replicas that replicate\(\) .* got Net"):
        model.call("generate", batch())


def test_a_range_of_the_profiler(pair: tuple[Any, Net]) -> None:
    """Each verb has its own."""
    model, _ = pair
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model.call("size", batch())
        model.run(importable, batch())
    names = {event.name for event in profile.events() if "DataParallel" in event.name}
    assert names == {"raydp_parallel.DataParallel.call", "raydp_parallel.DataParallel.run"}
