"""Each module of torch's own table, with the samples of its tests: whole, and in chunks."""

from __future__ import annotations

import copy
import sys
import unittest
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from raydp_parallel import DataParallel, Executor, Options, gather, scatter_kwargs

# Torch's tests import it, and the table does not use it.
sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
# They freeze the settings of backends for the whole process, where other tests of ours come later.
with patch.object(torch.backends, "disable_global_flags", lambda: None):
    from torch.testing._internal.common_modules import module_db

TABLE = {f"{info.name}-{mode}": (info, mode) for info in module_db for mode in ("train", "eval")}


def samples(name: str, every: bool, dtype: torch.dtype = torch.double) -> list[Any]:
    """The samples of a module in a mode; if not every one, the first and one of the others."""
    info, mode = TABLE[name]
    torch.manual_seed(0)
    how = {"device": oracle.place, "dtype": dtype, "requires_grad": True}
    found = [*info.module_inputs_func(info, training=mode == "train", **how)]
    return found if every else found[:: max(1, len(found) - 1) // 2 + 1]


def fresh(value: Any) -> Any:
    """Copy arguments; leaves stay leaves."""

    def copied(t: Tensor) -> Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    return tree_map_only(Tensor, copied, value)


def tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def by_hand(net: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run both chunks with the same buffers, of which those of the first stay."""
    outs, state = [], copy.deepcopy(dict(net.named_buffers()))
    for arguments, named in zip(*scatter_kwargs(args, kwargs, [0, 1]), strict=True):
        outs.append(net(*arguments, **named))
        after = copy.deepcopy(dict(net.named_buffers()))
        state, before = (after, state) if len(outs) == 1 else (state, state)
        for name, buffer in net.named_buffers():
            buffer.data.copy_(before[name])
    for name, buffer in net.named_buffers():
        buffer.data.copy_(state[name])
    return gather(outs, oracle.place)


def outcome(net: nn.Module, run: Any, given: Any, seed: int = 0) -> dict[str, Any]:
    """What a module gives: outputs, gradients and state, or the class of its error."""
    torch.manual_seed(seed)
    args, kwargs = fresh(given)
    try:
        found = run(net, args, kwargs)
        outs = [t for t in tensors(found) if t.requires_grad]
        if outs:
            sum(t.abs().square().sum() for t in outs).backward()  # type: ignore[union-attr]
    except Exception as error:
        return {type(error).__name__: None}
    grads = [t.grad for t in (*tensors((args, kwargs)), *net.parameters())]
    # Where a module has no tensors, a whole call's outputs lie on the CPU.
    values = {"outputs": [t.detach().to(oracle.place) for t in tensors(found)], "gradients": grads}
    return values | {"state": [*net.state_dict().values()]}


def differ(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Say where two outcomes differ."""
    try:
        torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


WAYS: dict[str, tuple[Any, Any]] = {
    "chunks": (lambda model, args, kwargs: model(*args, **kwargs), by_hand),
    "whole": (
        lambda model, args, kwargs: model.call("__call__", *args, split=False, **kwargs),
        lambda net, args, kwargs: net(*args, **kwargs),
    ),
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore")
def test_modules_of_torch(name: str, every: bool, two: Executor) -> None:
    """Outputs, gradients of inputs and parameters, buffers, and errors."""
    for number, sample in enumerate(samples(name, every)):
        made, given = sample.constructor_input, sample.forward_input
        net = TABLE[name][0].module_cls(*made.args, **made.kwargs).double()
        net.train(TABLE[name][1] == "train")
        inputs = given.args, given.kwargs
        for way, (ours, plain) in WAYS.items():

            def wrapped(net: nn.Module, args: Any, kwargs: Any, ours: Any = ours) -> Any:
                options = Options(unused_grads="none")
                return ours(DataParallel(net, executor=two, options=options), args, kwargs)

            one, other = (outcome(copy.deepcopy(net), plain, inputs, seed) for seed in (0, 1))
            if differ(one, other):  # it draws random numbers, which chunks draw otherwise
                one = outcome(copy.deepcopy(net), wrapped, inputs)
            told = differ(outcome(copy.deepcopy(net), wrapped, inputs), one)
            assert not told, f"sample {number}, {way}: {told}"


@pytest.mark.long
@pytest.mark.skipif(str(oracle.place) != "cuda:0", reason="of the stand-in GPU itself")
@pytest.mark.parametrize("form", [torch.preserve_format, torch.channels_last])
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore")
def test_modules_compute_on_the_stand_in_what_they_do_on_a_cpu(name: str, form: Any) -> None:
    """Without the wrapper, also complex numbers, and tensors with channels last."""
    if name.startswith("nn.NLLLoss") and form is torch.channels_last:
        pytest.skip("torch's backward takes none on a CPU")

    def placed(value: Any, device: Any) -> Any:
        def one(t: Tensor) -> Tensor:
            laid = t.detach().to(device).to(memory_format=form) if t.dim() == 4 else t.to(device)
            return laid.detach().requires_grad_(t.requires_grad)

        return tree_map_only(Tensor, one, value)

    info, mode = TABLE[name]
    dtypes = [d for d in (torch.double, torch.complex128) if d in info.dtypes]
    for dtype, sample in [(d, one) for d in dtypes for one in samples(name, True, d)]:
        made, given = sample.constructor_input, sample.forward_input
        net = info.module_cls(*made.args, **made.kwargs).to(dtype).train(mode == "train")
        if "Lazy" in name:  # its first forward draws weights
            net(*given.args)
        both = []
        for device in ("cpu", oracle.place):
            there = copy.deepcopy(net).to(device)
            for p in there.parameters():
                p.data = placed(p.data, device)
            inputs = placed((given.args, given.kwargs), device)
            run = outcome(there, lambda net, args, kwargs: net(*args, **kwargs), inputs)
            both.append(tree_map_only(Tensor, Tensor.cpu, run))
        assert not differ(*both), str(dtype)
