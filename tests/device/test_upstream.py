"""Upstream's own wrapper, on two stand-in GPUs, beside ours: what rows say of devices."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import on_gpus
import oracle
import pytest
import torch
from harness import assert_same_grads, assert_same_state
from torch import nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor, Options

if on_gpus.asked() in ("cpu", "cuda"):
    pytest.skip("the driver has no stand-in GPU: --device cuda:0", allow_module_level=True)

vars(torch._C).update(
    oracle.copies(lambda t, device: t.to("cpu" if device < 0 else torch.device("cuda", device)))
)


class Net(nn.Module):
    """Has a buffer, and says on which device it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()

    def forward(self, x: Any) -> dict[str, Any]:
        return {"y": self.layers(x), "where": self.layers[0].weight.device.type}


def pair(home: int, **how: Any) -> tuple[Any, Any]:
    """Ours and upstream's wrapper, of equal modules on a GPU."""
    module = Net().to(torch.device("cuda", home))
    ids = [home, 1 - home]
    theirs = torch.nn.DataParallel(copy.deepcopy(module), ids, **how)
    return DataParallel(module, ids, **how), theirs


@pytest.mark.parametrize("at", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("to", [None, 0, 1, -1])
@pytest.mark.parametrize("home", [0, 1])
def test_C3_S1_outputs_and_gradients_lie_where_upstream_s_do(home: int, to: Any, at: str) -> None:
    """Wherever the module, the inputs and the outputs are; and they are the same to the bit."""
    how = {} if to is None else {"output_device": to}
    both, results = pair(home, **how), []
    rows = torch.linspace(-1, 1, 24, dtype=torch.float64, device="cpu").view(6, 4)
    for model in both:
        x = rows.to(at).requires_grad_()
        y = model(x)["y"]
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
        assert model.src_device_obj == torch.device("cuda", home)
        assert all(p.grad.device == p.device for p in model.parameters())
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert_same_grads(*both, rtol=1e-12, atol=1e-12)
    assert_same_state(*both, rtol=0, atol=0)


@pytest.mark.parametrize("home", [0, 1])
def test_C3_C5_a_module_without_tensors_has_the_first_device(home: int) -> None:
    """So its outputs lie there, whatever device the input is on."""
    ids, x = [home, 1 - home], torch.ones(4, 2, device="cuda:0")
    for kind in (DataParallel, torch.nn.DataParallel):
        model = kind(nn.Softmax(1), ids)
        assert model.output_device == home and model(x).device.index == home
        assert model.src_device_obj == torch.device("cuda", home)


@pytest.mark.parametrize("left", ["memory 3", "memory 2", "processors 3", "processors 2"])
def test_C6_a_smaller_gpu_is_warned_of_in_upstream_s_words(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the constructor there, and here by the call that starts the replicas: they know it."""
    monkeypatch.setenv("NCCL_STANDIN", left)
    module, said = Net().to("cuda:0"), []
    with Executor([0], options=Options(metrics=False)) as executor:
        for how in ({}, {"executor": executor}):
            with warnings.catch_warnings(record=True) as caught:
                make = DataParallel if how else torch.nn.DataParallel
                make(module, [0, 1, 2], **how)(torch.ones(6, 4, dtype=torch.float64))
            said.append([str(one.message) for one in caught])
    assert said[0] == said[1] and len(said[0]) == left.endswith("2")


CALLS = {
    "F8": lambda of, net, x: of.data_parallel(net, x, [1, 0], 0)["y"],
    "F8, with the default": lambda of, net, x: of.data_parallel(net, x, [1, 0])["y"],
    "G10": lambda of, net, x: of.gather([x.to("cuda:0"), x.to("cuda:1")], 1),
    "G10, on the CPU": lambda of, net, x: of.gather([x.to("cuda:0"), x.to("cuda:1")], "cpu"),
}


@pytest.mark.parametrize("call", CALLS)
def test_F8_G10_functions_give_outputs_where_upstream_s_do(call: str) -> None:
    """Values and gradients, too."""
    net, results = Net().to("cuda:1"), []
    for of in (raydp_parallel, torch.nn.parallel):
        x = torch.ones(4, 4, dtype=torch.float64, device="cpu").requires_grad_()
        y = CALLS[call](of, net, x)
        y.sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("part", ["a parameter", "a buffer"])
def test_F1_tensors_on_another_gpu_are_refused_in_upstream_s_words(part: str) -> None:
    """Before anything runs."""
    said = []
    for model in pair(0):
        layers = model.module.layers
        if part == "a buffer":
            layers[1].running_mean = layers[1].running_mean.to("cuda:1")
        else:
            layers[2].weight = nn.Parameter(layers[2].weight.detach().to("cuda:1"))
        with pytest.raises(RuntimeError) as error:
            model(torch.ones(4, 4, dtype=torch.float64))
        said.append(str(error.value))
    assert said[0] == said[1]


def test_F2_hooks_of_the_wrapper_see_tensors_where_upstream_s_do() -> None:
    """Of the forward, before and after; the current device is the caller's all the time."""
    seen: list[list[Any]] = []
    for model in pair(1):
        calls: list[Any] = []
        model.register_forward_pre_hook(lambda _, x, calls=calls: calls.append(x[0].device))
        model.register_forward_hook(lambda _, x, y, calls=calls: calls.append(y["y"].device))
        model(torch.ones(4, 4, dtype=torch.float64, device="cuda:0"))
        seen.append([*calls, torch.cuda.current_device()])
    assert seen[0] == seen[1]
