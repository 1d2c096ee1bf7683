"""Upstream's copies between GPUs, which a build of torch without CUDA lacks, after its comm.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[int], _size: int
) -> list[list[Tensor]]:
    """The tensors themselves on the first device, copies on the others."""
    copies = [[t.detach().to(torch.device("cuda", d)) for t in tensors] for d in devices[1:]]
    return [[*tensors], *copies]


def scatter(
    tensor: Tensor, devices: Sequence[int], sizes: Any, dim: int, streams: Any
) -> list[Tensor]:
    """A view where the device is the tensor's, copies for the others."""
    chunks = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
    streams = streams or [None] * len(devices)
    found = []
    for chunk, device, stream in zip(chunks, devices, streams, strict=False):
        with torch.cuda.stream(stream):
            found.append(chunk.to(torch.device("cuda", device), non_blocking=True))
    return found


def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    """One tensor, with the first one's type."""
    where = torch.device("cpu" if destination == -1 else f"cuda:{destination or 0}")
    shape = [*tensors[0].shape]
    for number, t in enumerate(tensors):
        if t.dim() != len(shape):
            raise RuntimeError("Gather input tensors must have the same number of dimensions")
        shape[dim] = t.size(dim)
        if [*t.shape] != shape:
            raise RuntimeError(
                f"Input tensor at index {number} has invalid shape {[*t.shape]}, but expected "
                f"{shape}"
            )
    return torch.cat([t.to(where, tensors[0].dtype) for t in tensors], dim)


def install() -> None:
    """Give them to torch."""
    core: Any = torch._C
    core._broadcast_coalesced, core._scatter, core._gather = broadcast_coalesced, scatter, gather
