"""Upstream's nn.DataParallel on CPU: what this package is compared with.

``from oracle import DataParallel, data_parallel, replicate, scatter, scatter_kwargs,
parallel_apply, gather`` gives upstream's own Python over logical devices that are all the CPU:
``DataParallel(module, [0, 1])``. Only the leaves are replaced: the CUDA copies behind ``torch._C``,
the refusal of CPU tensors, streams, device contexts and the search for devices.

The sources are executed once more, as modules of their own, so importing this leaves torch as it
was. It cannot show what CPU tensors cannot: placement, aliasing between devices, streams, one
random generator per device.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DEVICES = 2
"""How many devices there are when none are named."""

_PACKAGE = "_upstream_on_cpu"
place = torch.device("cpu")
"""Of all logical devices."""


# --- the CUDA copies, after torch/csrc/cuda/comm.cpp ---


def copies(to: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """What a build without CUDA lacks, by its names in ``torch._C``.

    Args:
        to: Gives a tensor itself where it is on that device, and else a copy there; -1 is the CPU.
    """

    def broadcast(tensors: Sequence[Tensor], devices: Sequence[int], _size: int) -> list[list[Any]]:
        return [[*tensors], *([to(t.detach(), device) for t in tensors] for device in devices[1:])]

    def scatter(
        tensor: Tensor, devices: Sequence[int], _sizes: None, dim: int, _streams: Any
    ) -> list[Tensor]:
        if not devices:
            raise RuntimeError("Expected at least one device to scatter to")
        return [*map(to, tensor.chunk(len(devices), dim), devices)]

    def gather(tensors: Sequence[Tensor], dim: int, destination: int) -> Tensor:
        expected = [*tensors[0].shape]
        for index, t in enumerate(tensors):
            if t.dim() != len(expected):
                raise RuntimeError("Gather input tensors must have the same number of dimensions")
            expected[dim] = t.size(dim)
            if [*t.shape] != expected:
                text = f"Input tensor at index {index} has invalid shape {[*t.shape]}"
                raise RuntimeError(f"{text}, but expected {expected}")
        return torch.cat([to(t, destination).to(tensors[0].dtype) for t in tensors], dim)

    return {"_broadcast_coalesced": broadcast, "_scatter": scatter, "_gather": gather}


def _reduce_add(inputs: Sequence[Tensor], _destination: int | None = None) -> Tensor:
    if len(inputs) == 1:
        return inputs[0]
    total = inputs[0] + inputs[1]
    for tensor in inputs[2:]:
        total.add_(tensor)
    return total


# --- devices ---


def _device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """A device's index, as torch._utils._get_device_index; device 0 is the current one."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type == "cpu" and not allow_cpu:
            raise ValueError(f"Expected a non cpu device, but got: {device}")
        return -1 if device.type == "cpu" else (device.index or 0)
    if device is None and not optional:
        raise ValueError(
            f"Expected a torch.device with a specified index or an integer, but got:{device}"
        )
    return 0 if device is None else device


class _Instead:
    """An object with some attributes replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _no_context(_device: Any = None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


_accelerator = _Instead(
    torch.accelerator,
    is_available=lambda: True,
    current_accelerator=lambda: torch.device("cuda"),
    current_stream=_no_context,
    device_index=_no_context,
)
_cuda = _Instead(torch.cuda, current_stream=_no_context, stream=_no_context, device=_no_context)
"""What sources of torch before 2.10 use in the place of `torch.accelerator`."""


# --- upstream's modules ---


def _on_cpu(source: str) -> str:
    """Upstream's source, which imports the copies and does not refuse CPU tensors."""
    source = source.replace('.type != "cpu"', '.type != ""')
    source = source.replace("torch.nn.parallel import comm", f"{_PACKAGE} import comm")
    source = re.sub(
        r"from torch\.nn\.parallel\.(\w+) import", rf"from {_PACKAGE}.\1 import", source
    )
    return re.sub(r"[\w\[\]]+\.get_device\(\)", "0", source)  # where a CPU tensor says -1


def _load(name: str, **replaced: Any) -> ModuleType:
    upstream = importlib.import_module(f"torch.nn.parallel.{name}")
    module = ModuleType(f"{_PACKAGE}.{name}")
    module.__file__ = upstream.__file__
    sys.modules[module.__name__] = module
    source, named = _on_cpu(inspect.getsource(upstream)), f"{upstream.__file__} (on CPU)"
    exec(compile(source, named, "exec", dont_inherit=True), module.__dict__)
    vars(module).update(replaced)
    if "_get_device_index" in vars(module):
        vars(module)["_get_device_index"] = _device_index
    return module


_package = ModuleType(_PACKAGE)
_package.__path__ = []
sys.modules[_PACKAGE] = _package

_copies = _Instead(torch._C, **copies(lambda t, device: t.clone() if device else t))
comm = _package.comm = _load("comm", torch=_Instead(torch, _C=_copies), reduce_add=_reduce_add)  # type: ignore[attr-defined]
_streams = _Instead(torch, accelerator=_accelerator, cuda=_cuda)
_functions = _load("_functions", torch=_streams)
_scatter_gather = _load("scatter_gather")
_replicate = _load("replicate")
_parallel_apply = _load("parallel_apply", torch=_streams)
_data_parallel = _load(
    "data_parallel",
    # a tensor's device has no index on CPU
    torch=_Instead(torch, device=lambda *_: place),
    _get_available_device_type=lambda: "cpu",
    _get_all_device_indices=lambda: list(range(DEVICES)),
)

DataParallel = _data_parallel.DataParallel
data_parallel = _data_parallel.data_parallel
gather = _scatter_gather.gather
parallel_apply = _parallel_apply.parallel_apply
replicate = _replicate.replicate
scatter = _scatter_gather.scatter
scatter_kwargs = _scatter_gather.scatter_kwargs
