"""Joining the tensors that replicas returned, with torch's own operations, so that autograd works
through them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raydp_parallel.batch.autograd_functions import join_along
from raydp_parallel.options import Scalars

SCALARS: tuple[str, ...] = ("vector", "mean", "sum", "weighted_mean")


class Gathering(NamedTuple):
    """How to join.

    Attributes:
        place: The device of the result.
        dim: The dimension along which tensors are joined.
        scalars: What 0-dim tensors become.
        weights: The weight of each chunk in a weighted mean; they sum to 1.
    """

    place: torch.device
    dim: int
    scalars: Scalars
    weights: tuple[float, ...]


def join_tensors(tensors: Sequence[Tensor], how: Gathering) -> Tensor:
    """One tensor of all, in the first one's dtype, as upstream's C++ allocates it."""
    if all(tensor.dim() == 0 for tensor in tensors):
        if how.scalars != "vector":
            return _reduced(tensors, how)
        if how.dim == 0:
            tensors = _vectors(tensors)
    _check_shapes(tensors, how.dim)
    return join_along(_placed(tensors, how), how.dim)


def _placed(tensors: Sequence[Tensor], how: Gathering) -> list[Tensor]:
    return [tensor.to(device=how.place, dtype=tensors[0].dtype) for tensor in tensors]


def _vectors(scalars: Sequence[Tensor]) -> list[Tensor]:
    warnings.warn(
        "Was asked to gather along dimension 0, but all "
        "input tensors were scalars; will instead unsqueeze "
        "and return a vector. "
        "Options(scalars='mean') makes one number of it, as a loss has to be for backward.",
        stacklevel=2,
    )
    return [scalar.reshape(1) for scalar in scalars]


def _reduced(scalars: Sequence[Tensor], how: Gathering) -> Tensor:
    stacked = torch.stack(_placed(scalars, how))
    if how.scalars == "sum":
        return stacked.sum()
    if not (stacked.is_floating_point() or stacked.is_complex()):
        stacked = stacked.to(torch.get_default_dtype())  # a mean of counts is no count
    if how.scalars == "mean":
        return stacked.mean()
    return (stacked * torch.tensor(how.weights, dtype=stacked.dtype, device=stacked.device)).sum()


def _check_shapes(tensors: Sequence[Tensor], dim: int) -> None:
    """Compare all sizes but the one along ``dim``: torch.cat would let an empty 1-d tensor pass."""
    for index, tensor in enumerate(tensors):
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(
                f"Dimension out of range: input tensor at index {index} has shape "
                f"{list(tensor.shape)} and cannot be gathered along dim {dim}"
            )
    expected = list(tensors[0].shape)
    for index, tensor in enumerate(tensors):
        shape = list(tensor.shape)
        if len(shape) == len(expected):
            expected[dim] = shape[dim]
        if shape != expected:
            raise RuntimeError(
                f"Input tensor at index {index} has invalid shape {shape}, but expected {expected}"
            )
