"""Scatter and gather through the wrapper: rows S, K and G."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import Apply, assert_same_grads, made_of, raised, same, trio
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from raydp_parallel import DataParallel, parallel_apply, replicate
from raydp_parallel.batch import containers

TWO = ["cpu", "cpu"]
HALF, FLOAT, DOUBLE = torch.float16, torch.float32, torch.float64
Pair = namedtuple("Pair", "x y")


class Lists(list):
    """A list of the user's own."""


class Marked(Tensor):
    """A tensor of the user's own."""


@dataclass
class Sample:
    """A batch as a dataclass."""

    x: Tensor
    name: Any = "sample"


def apply(function: Callable[..., Any]) -> nn.Module:
    """A module that applies a function, and has a weight."""
    return Apply(function, weight=nn.Parameter(torch.tensor([1.0, 2.0, 3.0])))


def outputs(
    function: Callable[..., Any], *args: Any, replicas: int = 2, dim: int = 0, **kwargs: Any
) -> tuple[Any, Any]:
    """What the function gives through our wrapper and through upstream's."""
    ours, theirs, _ = trio(apply(function), replicas, dim=dim)
    return ours(*args, **kwargs), theirs(*args, **kwargs)


def rows(count: int = 6) -> Tensor:
    """A batch of distinct numbers."""
    return torch.arange(3.0 * count).view(count, 3)


@pytest.mark.parametrize(("count", "replicas"), [(5, 4), (6, 4), (3, 4), (1, 2), (7, 3)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_S1_replicas_get_the_rows_that_upstream_s_get(count: int, replicas: int, dim: int) -> None:
    """Chunks of torch.chunk's sizes, in order."""
    x = rows(count) if dim == 0 else rows(count).t()
    ours, theirs = outputs(
        lambda _net, x: x * x.shape[dim] + x.min(), x, replicas=replicas, dim=dim
    )
    same(ours, theirs)


def write(_net: Any, x: Tensor) -> Tensor:
    """Write to the input."""
    x.add_(1)
    return x * 2


def test_S2_what_forward_writes_to_its_inputs_stays_in_the_replica() -> None:
    """A deviation: chunk 0 of upstream's is a view of the caller's tensor."""
    ours, theirs, _ = trio(apply(write), 2)
    x, y = torch.zeros(4, 1), torch.zeros(4, 1)
    same(ours(x), theirs(y))
    assert x.flatten().tolist() == [0.0] * 4
    assert y.flatten().tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("leaf", [True, False])
def test_S2_writing_to_an_input_that_requires_grad_raises(leaf: bool) -> None:
    """RuntimeError from both, about another reason."""
    for model in trio(apply(write), 2)[:2]:
        x = torch.zeros(4, 1, requires_grad=True)
        error = raised(lambda model=model, x=x: model(x if leaf else x * 1))
        assert type(error) is RuntimeError
        assert str(error).startswith("Caught RuntimeError in replica 0 on device")


def test_S3_replicas_get_plain_tensors_of_the_same_class_and_layout() -> None:
    """A Parameter is none inside; subclasses, channels_last and requires_grad stay."""

    def look(_net: Any, x: Tensor, parameter: Tensor, marked: Tensor) -> Tensor:
        found = [
            type(parameter) is Tensor and parameter.requires_grad and not x.requires_grad,
            type(marked) is Marked,
            x.is_contiguous(memory_format=torch.channels_last),
        ]
        return torch.tensor([found])

    x = torch.ones(4, 3, 2, 5).contiguous(memory_format=torch.channels_last)
    ours, theirs = outputs(look, x, nn.Parameter(torch.ones(4)), torch.ones(4).as_subclass(Marked))
    same(ours, theirs)
    assert ours.all()


def test_S3_tensors_of_odd_classes_are_inputs_and_weights() -> None:
    """A class that a function defines, and one made of other tensors, which has no memory."""

    class Local(Tensor):
        """Has no name that another process knows."""

    kinds: dict[Callable[[Tensor], Tensor], Callable[[Any], Any]] = {
        lambda t: t.as_subclass(Local): lambda t: t.tolist(),
        lambda t: TwoTensor(t, t + 1): lambda t: (t.a.tolist(), t.b.tolist()),
    }
    for make, shown in kinds.items():
        net = Apply(lambda net, x: x * net.factor, factor=nn.Parameter(make(torch.ones(1, 3))))
        model, x = DataParallel(net, TWO), make(torch.randn(4, 3))
        for _ in range(2):
            assert shown(model(x)) == shown(net(x))
            net.factor.data.mul_(2)


def test_S4_scalar_tensors_reach_every_replica_and_collect_gradients() -> None:
    """As in the plain module, where upstream raises."""
    ours, theirs, plain = trio(apply(lambda net, x, scale: x * net.weight * scale), 3)
    grads = []
    for model in (ours, plain):
        scale = torch.tensor(2.0, requires_grad=True)
        model(rows(5), scale).sum().backward()
        grads.append(scale.grad)
    torch.testing.assert_close(*grads)
    assert_same_grads(ours, plain)
    assert isinstance(raised(lambda: theirs(rows(5), torch.tensor(2.0))), RuntimeError)


def test_S7_S8_replicas_get_containers_of_upstream_s_classes() -> None:
    """Lists are plain, ordered dicts and namedtuples stay, as do defaultdicts (not upstream)."""

    def names(_net: Any, value: Any) -> Any:
        classes = [type(part).__name__ for part in (value, *value)]
        assert classes == ["list", "OrderedDict", "Pair", "list"], classes
        return value

    value = Lists([OrderedDict(b=rows(4), a=rows(4)), Pair(rows(4), rows(4) + 1), Lists([rows(4)])])
    same(*outputs(names, value))
    ours, theirs, _ = trio(apply(lambda _net, value: value["x"] + len(value["new"])), 2)
    same(ours(defaultdict(list, x=rows(4))), rows(4))
    assert isinstance(raised(lambda: theirs(defaultdict(list, x=rows(4)))), TypeError)


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (lambda _net, texts: torch.ones(len(texts), 2), ["a", "b", "c"], "register_batch_type"),
        (
            lambda _net, pair: pair[0] + pair[1],
            (rows(4), rows(2)),
            "inputs[0][0]: size 4, 2 chunks; inputs[0][1]: size 2, 2 chunks",
        ),
    ],
    ids=["nothing can be split", "sizes differ"],
)
def test_S6_S9_odd_splits_are_warned_of_once(function: Any, given: Any, words: str) -> None:
    """Upstream's result, and one warning for each wrapper."""
    ours, theirs, _ = trio(apply(function), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            same(ours(given), theirs(given))
    (warning,) = [str(one.message) for one in caught]
    assert words in warning


def test_S10_objects_among_the_arguments_are_copies() -> None:
    """A deviation: upstream's replicas share them with the caller, who sees what forward does."""

    def append(_net: Any, x: Tensor, box: dict[str, Any]) -> Tensor:
        box["new"] = 1
        box["seen"].append(len(x))
        return x * len(box["seen"])

    ours, theirs, _ = trio(apply(append), 2)
    mine: dict[str, Any] = {"seen": [], "x": rows(4)}
    same(ours(rows(4), mine), rows(4))
    assert mine["seen"] == [] and "new" not in mine
    box: dict[str, Any] = {"seen": [], "x": rows(4)}
    theirs(rows(4), box)
    assert box["seen"] == [2, 2] and "new" not in box


@made_of(net=lambda: nn.LSTM(3, 4, batch_first=True))
def recurrent(net: Any, x: Any) -> Any:
    """An LSTM that takes and gives packed sequences, or padded ones and its state."""
    return net.net(x) if isinstance(x, Tensor) else net.net(x)[0]


@pytest.mark.parametrize("replicas", [2, 3])
def test_S12_packed_sequences_train_as_in_the_plain_module(replicas: int) -> None:
    """They are split by sequence and come back as one; outputs, weights' and inputs' gradients."""
    ours, _, plain = trio(recurrent(), replicas)
    results = []
    for model in (ours, plain):
        padded = torch.linspace(-1, 1, 75).view(5, 5, 3).requires_grad_()
        packed = pack_padded_sequence(
            padded, [3, 1, 4, 2, 5], batch_first=True, enforce_sorted=False
        )
        out = model(packed)
        assert type(out) is PackedSequence
        out, lengths = pad_packed_sequence(out, batch_first=True)
        out.square().sum().backward()
        results.append((out.detach(), lengths, padded.grad))
    torch.testing.assert_close(*results)
    assert_same_grads(ours, plain)


@pytest.mark.upstream
def test_S13_complex_tensors_along_the_last_dimension() -> None:
    """Split and joined there, where upstream trips over the imaginary axis."""
    ours, theirs, plain = trio(apply(lambda _net, x: x * 2), 2, dim=-1)
    x = torch.complex(rows(4), -rows(4))
    same(ours(x), plain(x))
    assert isinstance(raised(lambda: theirs(x)), RuntimeError)


def test_K2_one_row_and_a_flag_are_one_chunk() -> None:
    """Upstream calls a second replica without its input (pytorch#31460)."""
    ours, theirs, plain = trio(apply(lambda net, x, flag: net.weight * x if flag else x), 2)
    same(ours(rows(1), flag=True), plain(rows(1), flag=True))
    error = raised(lambda: theirs(rows(1), flag=True))
    assert isinstance(error, TypeError) and "replica 1" in str(error)


@pytest.mark.parametrize("replicas", [2, 3])
def test_G2_G11_scalars_become_a_vector_also_beside_batches(replicas: int) -> None:
    """With upstream's warning, once for each scalar; gradients included."""
    ours, theirs, _ = trio(apply(lambda net, x: ((x * net.weight).sum(), x * net.weight)), replicas)
    texts = []
    for model in (ours, theirs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss, out = model(rows(5))
        texts.append([str(w.message) for w in caught])
        assert loss.shape == (replicas,) and out.shape == (5, 3)
        (loss * torch.arange(1.0, replicas + 1)).sum().backward()
    (ours_said,), (theirs_said,) = texts
    assert ours_said.startswith(theirs_said) and "Options(scalars='mean')" in ours_said
    assert_same_grads(ours, theirs)


JOINED: dict[str, Callable[[], nn.Module]] = {
    "half": lambda: apply(lambda net, x: (x * net.weight).to(HALF if x.min() == 0 else FLOAT)),
    "double": lambda: apply(lambda net, x: (x * net.weight).to(DOUBLE if x.min() == 0 else FLOAT)),
    "states of an LSTM": recurrent,  # of which dim is not the batch's
    "a parameter": lambda: apply(lambda net, _x: net.weight),
}


@pytest.mark.parametrize("name", JOINED)
def test_G9_G12_G13_outputs_are_joined_as_upstream_s(name: str) -> None:
    """The dtype is chunk 0's; a parameter is repeated, and its gradients add up."""
    ours, theirs, _ = trio(JOINED[name](), 3)
    outs = [model(rows(6).view(6, 1, 3)) for model in (ours, theirs)]
    torch.testing.assert_close(*outs)
    for out in outs:
        parts = tree_leaves(out)
        sum((t.float().flatten() * torch.arange(t.numel())).sum() for t in parts).backward()
    assert_same_grads(ours, theirs, rtol=1e-5, atol=1e-4)


class Holder:
    """An object that is no container."""

    def __init__(self, held: Any) -> None:
        self.held = held


@dataclass
class Keeps(Sample):
    """Gathered by its own rule, which copies nothing."""

    @classmethod
    def __gather__(cls, parts: Any, *_: Any) -> Any:
        return parts


@dataclass
class Items(dict):
    """A dict whose items are fields, too, as transformers' outputs are."""

    x: Any

    def __post_init__(self) -> None:
        self["x"] = self.x


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda y: (y, {"y": OrderedDict(y=y)}, Pair(y, None), Sample(y), [1, "text"]),
    "rule": Keeps,
    "object": lambda y: (y, y, Holder(y * 2)),
    "same object": lambda y: [y, Holder(y)],
    "registered": lambda y: Marked(y.detach()),
    "subclass": lambda y: {"y": y, "lists": Lists([y])},
    "items": Items,
    "key": lambda y: {y: y},
}
CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "model": lambda model, x: model(x),
    "run": lambda model, x: model.run(lambda net, x: net(x), x),
    "no gather": lambda model, x: model.call("forward", x, gather=False),
    "parallel_apply": lambda model, x: parallel_apply(replicate(model.module, TWO), [x, x]),
    "map": lambda model, x: [*model.map([x, x + 1, x + 2])],
    "with_loss": lambda model, x: model.with_loss(lambda y, _: y, reduction="none")(x, x),
}


def held_in(value: Any) -> list[Tensor]:
    """All tensors of an output."""
    if isinstance(value, Tensor):
        return [value]
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    parts = [*vars(value).values()] if hasattr(value, "__dict__") else parts
    return [t for part in parts for t in held_in(part)] if isinstance(parts, (list, tuple)) else []


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore:.*not joined")
def test_B14_no_later_call_writes_to_outputs(
    name: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever holds them; messages lie in memory that is used again."""
    monkeypatch.setattr(containers, "registered", {Marked: (None, lambda parts, *_: parts)})
    x = rows(1 if name == "key" else 4)
    model = DataParallel(apply(lambda net, x: RETURNED[name](x * net.weight)), TWO)
    for call, function in CALLS.items():
        with torch.set_grad_enabled(grad):
            held = held_in(function(model, x))
            before = [t.detach().clone() for t in held]
            function(model, x + 9)
        assert held and all(map(torch.equal, before, held)), call
