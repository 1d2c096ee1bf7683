"""What a wrapper does besides training: placement, autocast, formats of tensors."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydp_parallel.check import nets
from raydp_parallel.check.here import Here, distance, distances, exact
from raydp_parallel.check.table import Row, RowResult

STEPS = 5
_CLOSE = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""How far results may differ from the plain module's in short floats: sums have another order."""


def placement(here: Here) -> RowResult:
    """Chunks run on the devices of their replicas; nested inputs are split, nested outputs gathered
    in order.
    """
    x, y = torch.arange(20.0).view(10, 2).to(here.device), torch.arange(10.0).to(here.device)
    model = here.ours(nets.Witness(), here.several)
    scaled, nested, (weights, inputs, counts) = model(x, {"y": y})
    devices = [info.device for info in here.executor().replicas()]
    chunks = [len(part) for part in x.chunk(len(here.several))]
    wrong = [
        f"{name} {found}, expected {expected}"
        for name, found, expected in (
            ("rows", counts, chunks),
            ("inputs on", inputs, weights),
            ("output on", str(scaled.device), str(here.device)),
            ("output", scaled.tolist(), x.tolist()),
            ("nested output", nested["twice"].tolist(), (2 * y).tolist()),
        )
        if found != expected
    ]
    strays = [device for device in weights if device.split(":")[0] != here.device.type]
    if strays:
        wrong.append(f"weights on {strays}")
    text = "; ".join(wrong) or (
        f"chunks of {counts} rows, weights and inputs on {', '.join(weights)}"
    )
    return RowResult(text, {"chunks": counts, "weights": weights, "replicas": devices}, not wrong)


def output_device(here: Here) -> RowResult:
    """Outputs go to the master's device or to ``output_device``; gradients come back from there."""
    places: list[Any] = ["cpu"]
    if here.gpus:
        places.append(here.device)
    if here.gpus > 1:
        places.append(here.gpus - 1)
    found, wrong = {}, []
    x = torch.randn(6, 8, device=here.device)
    for place in places:
        model = here.ours(nets.perceptron(), here.several, output_device=place)
        out = model(x)
        out.sum().backward()
        wanted = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
        grads = {str(p.grad.device) for p in model.parameters() if p.grad is not None}
        found[str(place)] = str(out.device)
        if out.device != wanted or grads != {str(here.device)}:
            wrong.append(f"asked for {wanted}: outputs on {out.device}, gradients on {grads}")
    text = "; ".join(wrong) or ", ".join(f"{place}: {device}" for place, device in found.items())
    return RowResult(text, found, not wrong)


def host_inputs(here: Here) -> RowResult:
    """Inputs may lie on the CPU, pinned or not, and the driver's current device stays the same."""
    plain = nets.perceptron()
    model, x = here.ours(copy.deepcopy(plain), here.several), torch.randn(6, 8)
    before = torch.cuda.current_device() if here.gpus else -1
    with exact(), torch.no_grad():
        expected = plain(x)
        outputs = [model(x)]
        if here.gpus:
            outputs.append(model(x.pin_memory()))
    gap = max(float((out.cpu() - expected).abs().max()) for out in outputs)
    after = torch.cuda.current_device() if here.gpus else -1
    moved = "" if before == after else f"; the current device was {before} and is {after}"
    return RowResult(
        f"largest difference {gap:.0e}{moved}", {"difference": gap}, gap < 1e-5 and not moved
    )


def autocast(dtype: torch.dtype, here: Here) -> RowResult:
    """Losses, the scaler's scale and the weights are close to the plain module's."""
    torch.manual_seed(0)
    made = nets.perceptron(64).to(here.device)
    plain = _train_short(copy.deepcopy(made), dtype, here.device)
    found = {}
    for ids in (here.one, here.several):
        model = here.ours(copy.deepcopy(made), ids)
        losses, scale, weights = _train_short(model, dtype, here.device)
        if scale != plain[1]:
            return RowResult(f"the scale is {scale}, expected {plain[1]}", {}, False)
        gap = max(distance(losses, plain[0]), distance(weights, plain[2]))
        found[f"{len(ids)} chunk{'s' * (len(ids) > 1)}"] = gap
    text = ", ".join(f"{name} {gap:.0e}" for name, gap in found.items())
    return RowResult(
        f"{text} from plain, scale {plain[1]:g}", found, max(found.values()) <= _CLOSE[dtype]
    )


def _train_short(
    net: nn.Module, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, float, Tensor]:
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(32, 8, generator=random).to(device)
        y = torch.randint(3, (32,), generator=random).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            out = net(x)
            if out.dtype != dtype:
                raise TypeError(
                    f"the output is {out.dtype}, expected {dtype}: autocast did not reach the "
                    "replicas"
                )
            loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return torch.stack(losses), float(scaler.get_scale()), weights


def formats(here: Here) -> RowResult:
    """The output of a convolution over channels_last images keeps that format."""
    net = nn.Conv2d(3, 8, 3, padding=1).to(here.device)
    net.weight.data = net.weight.data.contiguous(memory_format=torch.channels_last)
    x = torch.randn(6, 3, 8, 8, device=here.device).contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(net)
    with exact():
        expected, out = plain(x), here.ours(net, here.several)(x)
        out.sum().backward()
        expected.sum().backward()
    kept, plain_kept = (t.is_contiguous(memory_format=torch.channels_last) for t in (out, expected))
    gap = distance(out.detach(), expected.detach())
    text = f"output strides {out.stride()}, plain {expected.stride()}; difference {gap:.0e}"
    return RowResult(text, {"difference": gap}, kept == plain_kept and gap < 1e-5)


def sparse(here: Here) -> RowResult:
    """An embedding's sparse gradients stay sparse, and equal the plain module's."""
    torch.manual_seed(0)
    net = nn.Embedding(20, 4, sparse=True).to(here.device)
    plain = copy.deepcopy(net)
    ids = torch.randint(20, (8, 3), generator=torch.Generator().manual_seed(2)).to(here.device)
    here.ours(net, here.several)(ids).square().sum().backward()
    plain(ids).square().sum().backward()
    found, expected = net.weight.grad, plain.weight.grad
    assert found is not None
    assert expected is not None
    gap = distance(found.to_dense(), expected.to_dense())
    return RowResult(
        f"layout {found.layout}, difference {gap:.0e}",
        {"difference": gap},
        found.is_sparse and gap < 1e-6,
    )


def complex_numbers(here: Here) -> RowResult:
    """Complex inputs, weights, outputs and gradients."""
    torch.manual_seed(0)
    net = nets.Complex().to(here.device)
    plain = copy.deepcopy(net)
    random = torch.Generator().manual_seed(2)
    x = torch.randn(8, 5, dtype=torch.complex128, generator=random).to(here.device).conj()
    out, expected = here.ours(net, here.several)(x), plain(x)
    out.abs().square().sum().backward()
    expected.abs().square().sum().backward()
    assert net.weight.grad is not None
    assert plain.weight.grad is not None
    gap = max(
        distance(torch.view_as_real(a), torch.view_as_real(b))
        for a, b in _pairs(out, expected, net, plain)
    )
    return RowResult(f"difference {gap:.0e}", {"difference": gap}, gap < 1e-12)


def _pairs(out: Tensor, expected: Tensor, net: Any, plain: Any) -> list[tuple[Tensor, Tensor]]:
    return [(out.detach().resolve_conj(), expected.detach()), (net.weight.grad, plain.weight.grad)]


def silent_edits(here: Here) -> RowResult:
    """Edits of weights that move no version (``p.data.mul_()``) reach the replicas."""
    net = nets.perceptron().to(here.device)
    model, x = here.ours(net, here.several), torch.randn(6, 8, device=here.device)
    with exact(), torch.no_grad():
        model(x)
        next(net.parameters()).data.mul_(2)
        gap = distance(model(x), net(x))
    return RowResult(
        f"difference {gap:.0e} after an edit that moves no version", {"difference": gap}, gap < 1e-5
    )


def buffers(here: Here) -> RowResult:
    """Batch norm's running means of chunk 0 reach the module, once per forward, in training mode
    only.
    """
    net = nn.BatchNorm1d(8).to(here.device)
    plain = copy.deepcopy(net)
    model, x = here.ours(net, here.several), torch.randn(6, 8, device=here.device)
    for _ in range(3):
        model(x)
        plain(x.chunk(len(here.several))[0])
    model.eval()(x)
    assert net.running_mean is not None
    assert plain.running_mean is not None
    gap, count = distance(net.running_mean, plain.running_mean), int(net.num_batches_tracked or 0)
    return RowResult(
        f"difference {gap:.0e}, {count} forwards counted",
        {"difference": gap},
        gap < 1e-5 and count == 3,
    )


def settings(here: Here) -> RowResult:
    """Precision set by torch's newer interface, and the variable that deterministic algorithms
    require, reach running replicas.
    """
    model, x = here.ours(nets.Products(), here.several), torch.randn(6, 8, device=here.device)
    model(x)
    newer = hasattr(torch._C, "_get_fp32_precision_getter")
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision if newer else ""
    variable, known = "CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ[variable] = known or ":4096:8"
    try:
        if newer:
            matmul.fp32_precision = "tf32"
        torch.use_deterministic_algorithms(True)
        _, seen = model(x)
        expected = {"tf32" if newer else ""}, {os.environ[variable]}
    finally:
        torch.use_deterministic_algorithms(False)
        if newer:
            matmul.fp32_precision = before
        if known is None:
            del os.environ[variable]
    found = tuple(map(set, seen))
    wrong = "" if found == expected else f"; EXPECTED {expected}"
    return RowResult(f"replicas compute with {found}{wrong}", {}, not wrong)


def on_cpus(here: Here) -> RowResult:
    """A module on the driver's GPU with replicas on CPUs gets the plain module's gradients."""
    return _gradients(here, here.device, ["cpu", "cpu"])


def on_the_host(here: Here) -> RowResult:
    """A module on the CPU with replicas on GPUs, in a program that uses a GPU too."""
    return _gradients(here, torch.device("cpu"), here.several)


def _gradients(here: Here, device: torch.device, ids: Sequence[Any]) -> RowResult:
    """A module on a device gets the plain module's gradients from replicas on others."""
    torch.manual_seed(0)
    net = nets.perceptron(256).to(device)
    plain, x = copy.deepcopy(net), torch.randn(6, 8, device=device)
    with exact():
        here.wrapped(net, ids)(x).square().sum().backward()
        plain(x).square().sum().backward()
    gap = max(distances(net, plain))
    return RowResult(f"difference {gap:.0e}", {"difference": gap}, gap < 1e-5)


def flattened(here: Here) -> RowResult:
    """Steps of a recurrent net that calls `flatten_parameters()`: the plain module's weights."""
    torch.manual_seed(0)
    net = nets.Flattens().double().to(here.device)
    plain, model = copy.deepcopy(net), here.ours(net, here.one)
    pairs = [(one, torch.optim.SGD(one.parameters(), 0.1)) for one in (model, plain)]
    with exact():
        for _ in range(3):
            x = torch.randn(4, 7, 6, dtype=torch.float64, device=here.device)
            for one, optimizer in pairs:
                optimizer.zero_grad()
                one(x).square().sum().backward()
                optimizer.step()
    gap = max(map(distance, net.parameters(), plain.parameters()))
    return RowResult(f"difference {gap:.0e}", {"difference": gap}, gap < 1e-9)


def names_a_device(here: Here) -> RowResult:
    """A module that names the driver's last GPU computes on the replica's own."""
    last = torch.device("cuda", here.gpus - 1) if here.gpus else here.device
    net = nets.Named(last).to(here.device)
    x = torch.ones(2 * len(here.several), 4, device=here.device)
    found = here.ours(net, here.several)(x)
    good = torch.equal(found, x) and net.place == last
    return RowResult("computed" if good else "WRONG", {}, good)


ROWS = (
    Row("behaviour", "scatter and gather", placement),
    Row("behaviour", "output_device", output_device),
    Row("behaviour", "inputs on the CPU", host_inputs),
    Row("behaviour", "autocast float16, GradScaler", functools.partial(autocast, torch.float16)),
    Row("behaviour", "autocast bfloat16, GradScaler", functools.partial(autocast, torch.bfloat16)),
    Row("behaviour", "channels_last", formats),
    Row("behaviour", "sparse gradients", sparse),
    Row("behaviour", "complex numbers", complex_numbers),
    Row("behaviour", "buffers", buffers),
    Row("behaviour", "edits that move no version", silent_edits),
    Row("behaviour", "the caller's settings", settings),
    Row("behaviour", "recurrent net that flattens", flattened),
    Row("behaviour", "a device that the module names", names_a_device),
    Row("behaviour", "replicas on CPUs", on_cpus, gpus=1),
    Row("behaviour", "module on the CPU", on_the_host, gpus=1),
)
