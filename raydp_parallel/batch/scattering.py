"""Scatter: one value into one value per chunk.

Upstream splits each tensor separately and zips the pieces, so arguments of different sizes lose
rows silently (pytorch#7358, #31460). Here each cut is noted, and cuts that disagree raise an error
before anything runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch

from raydp_parallel.batch.autograd_functions import Cut, split_tensor
from raydp_parallel.batch.chunk_sizes import ChunkSizes, even_sizes
from raydp_parallel.batch.containers import (
    ContainerKind,
    container_like,
    contents,
    is_namedtuple,
    kind_of,
    step,
)
from raydp_parallel.batch.custom_types import splitter_of, takes_sizes
from raydp_parallel.batch.packed import sequences, split_packed
from raydp_parallel.devices.ambient_state import uncompiled


class _Cut(NamedTuple):
    """One value that was split: its path, its size (None if its class split it) and its number of
    chunks.
    """

    path: str
    size: int | None
    chunks: int

    def __str__(self) -> str:
        size = "" if self.size is None else f"size {self.size}, "
        return f"{self.path}: {size}{self.chunks} chunk{'s' * (self.chunks != 1)}"


class _Plan:
    """The most chunks to split into, the dimension, the sizes of chunks if `torch.chunk` does not
    give them, and the cuts made so far.
    """

    def __init__(self, chunks: int, dim: int, sizes: ChunkSizes | None = None) -> None:
        self.chunks = chunks
        self.dim = dim
        self.sizes = sizes
        self.cuts: list[_Cut] = []

    def cut(self, rows: int) -> Cut:
        """How so many rows are cut."""
        return self.chunks if self.sizes is None else self.sizes(rows)

    def note(self, path: str, size: int | None, pieces: Sequence[Any]) -> Sequence[Any]:
        """Note the cut of a value, and return its pieces."""
        self.cuts.append(_Cut(path, size, len(pieces)))
        return pieces

    def agreed(self, unequal: Callable[[str], object] | None = None) -> int:
        """The number of chunks, which all cuts must have in common; without any cut there is a copy
        for each device.

        Args:
            unequal: Called with a text if the cuts have different sizes.

        Raises:
            ValueError: The cuts differ, so that rows would be lost or would not belong together.
        """
        counts = {cut.chunks for cut in self.cuts}
        if len(counts) > 1:
            raise ValueError(
                f"arguments split into different numbers of chunks along dim {self.dim} over "
                f"{self.chunks} devices, so rows would be lost: {'; '.join(map(str, self.cuts))}. "
                f"Give all of them one size along dim {self.dim}; what every replica needs whole "
                "may be a 0-dim tensor or anything that is no tensor."
            )
        if len({cut.size for cut in self.cuts} - {None}) > 1:
            if self.sizes is not None:
                raise ValueError(
                    f"arguments have different sizes along dim {self.dim}, so chunks of chosen "
                    f"sizes (chunk_weights, least_rows) would not pair their rows: "
                    f"{'; '.join(map(str, self.cuts))}. Give all of them one size"
                )
            if unequal is not None:
                unequal("; ".join(map(str, self.cuts)))
        return counts.pop() if counts else self.chunks


@overload
def scatter(
    inputs: torch.Tensor, target_gpus: Sequence[Any], dim: int = 0
) -> tuple[torch.Tensor, ...]: ...
@overload
def scatter(inputs: Any, target_gpus: Sequence[Any], dim: int = 0) -> Any: ...
@uncompiled
def scatter(inputs: Any, target_gpus: Sequence[Any], dim: int = 0) -> Any:
    """Split the tensors in a nested value into chunks, views on their own device; other values go
    to every chunk.

    Tensors are split as ``torch.chunk`` does, so there may be fewer chunks than devices; 0-dim
    tensors go to every chunk. Containers, UserDicts and dataclasses are copied for each chunk,
    packed sequences split by sequence.

    Args:
        inputs: The value: a tensor, or containers of tensors and other things.
        target_gpus: The devices; only their number matters here.
        dim: The dimension along which tensors are split.

    Returns:
        A tuple of chunks for a tensor, otherwise a list, as upstream.

    Raises:
        RuntimeError: There is no device.
        IndexError: A tensor lacks the dimension.
        ValueError: Tensors yield different numbers of chunks.
    """
    plan = _plan(target_gpus, dim)
    pieces = _split(inputs, plan, "inputs")
    plan.agreed()  # raises where rows would be lost
    return tuple(pieces) if isinstance(inputs, torch.Tensor) else list(pieces)


@uncompiled
def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[Any],
    dim: int = 0,
    *,
    unequal: Callable[[str], object] | None = None,
    sizes: ChunkSizes | None = None,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Split positional and keyword arguments together, so that both results have one entry per
    chunk.

    Args:
        inputs: The positional arguments.
        kwargs: The keyword arguments, or None.
        target_gpus: The devices; only their number matters here.
        dim: The dimension along which tensors are split.
        unequal: Called with a text if arguments have different sizes, but split into the same
            number of chunks.
        sizes: The rows of each chunk, for a number of rows; None splits as ``torch.chunk`` does.
            All arguments must have one size then.

    Returns:
        Positional and keyword arguments per chunk; two empty tuples when there are no arguments at
        all.

    Raises:
        RuntimeError: There is no device.
        IndexError: A tensor lacks the dimension.
        ValueError: Tensors yield different numbers of chunks; or ``sizes`` were given, and
            tensors of different sizes, or a value whose class splits it without them.
    """
    if not inputs and not kwargs:
        return (), ()
    plan = _plan(target_gpus, dim, sizes)
    # nearly every call
    if not kwargs and {*map(type, inputs)} == {torch.Tensor} and splitter_of(inputs[0]) is None:
        split = [
            _split_tensor(tensor, plan, f"inputs[{number}]") for number, tensor in enumerate(inputs)
        ]
        chunks = plan.agreed(unequal)
        return tuple(zip(*split, strict=False)), tuple([{} for _ in range(chunks)])
    positional = _split(inputs, plan, "inputs") if inputs else [()] * plan.chunks
    keyword = _split(kwargs, plan, "kwargs") if kwargs else [{} for _ in range(plan.chunks)]
    chunks = plan.agreed(unequal)
    return tuple(positional[:chunks]), tuple(keyword[:chunks])


@overload
def rows(inputs: Any, kwargs: Any, dim: int) -> int: ...
@overload
def rows(inputs: Any, kwargs: Any, dim: int, otherwise: None) -> int | None: ...
def rows(inputs: Any, kwargs: Any, dim: int, otherwise: int | None = 0) -> int | None:
    """How many rows a chunk has: the size along ``dim`` of its first tensor that has one.

    Args:
        inputs: The chunk's positional arguments.
        kwargs: The chunk's keyword arguments, or None.
        dim: The dimension along which the batch was split.
        otherwise: What is returned if there is no such tensor.
    """
    if inputs and type(inputs[0]) is torch.Tensor and inputs[0].dim() > dim >= 0:
        return inputs[0].size(dim)  # nearly every call
    return next(sizes((inputs, kwargs), dim), otherwise)


def sizes(value: Any, dim: int) -> Iterator[int]:
    """The sizes of a chunk's tensors along the dimension along which the batch was split."""
    kind = kind_of(value)
    if kind is ContainerKind.TENSOR and -value.dim() <= dim < value.dim():
        yield value.size(dim)
    elif kind is ContainerKind.PACKED:
        yield sequences(value)
    for part in contents(value, kind).values():
        yield from sizes(part, dim)


def _plan(target_gpus: Sequence[Any], dim: int, sizes: ChunkSizes | None = None) -> _Plan:
    if len(target_gpus) == 0:
        raise RuntimeError("Expected at least one device to scatter to")
    return _Plan(len(target_gpus), dim, sizes)


def _split(value: Any, plan: _Plan, path: str) -> Sequence[Any]:
    own = splitter_of(value)
    if own is not None:
        return _split_custom(own, plan, path)
    kind = kind_of(value)
    if kind is ContainerKind.TENSOR:
        return _split_tensor(value, plan, path)
    if kind is ContainerKind.PACKED:
        count = sequences(value)
        return plan.note(path, count, split_packed(value, plan.cut(count)))
    return _split_parts(value, kind, plan, path)


def _split_custom(own: Callable[..., Sequence[Any]], plan: _Plan, path: str) -> Sequence[Any]:
    if takes_sizes(own):
        sizes = plan.sizes or functools.partial(even_sizes, chunks=plan.chunks)
        pieces = list(own(plan.chunks, plan.dim, sizes=sizes))
    elif plan.sizes is None:
        pieces = list(own(plan.chunks, plan.dim))
    else:
        raise ValueError(
            f"{path} is split by a rule of its class that takes no sizes, so it cannot be split "
            "with chunk_weights or least_rows: give the rule a parameter sizes, a function from "
            "a number of rows to the rows of each chunk"
        )
    if not 1 <= len(pieces) <= plan.chunks:
        raise ValueError(
            f"{path} was split by its own rule into {len(pieces)} chunks, "
            f"expected 1 to {plan.chunks}"
        )
    return plan.note(path, None, pieces)


def _split_tensor(tensor: torch.Tensor, plan: _Plan, path: str) -> Sequence[Any]:
    dims = tensor.dim()
    if dims == 0:
        return [tensor] * plan.chunks
    if not -dims <= plan.dim < dims:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-dims}, {dims - 1}], but got "
            f"{plan.dim}): {path} has shape {tuple(tensor.shape)} and cannot be split along dim "
            f"{plan.dim}"
        )
    size = tensor.size(plan.dim)
    return plan.note(path, size, split_tensor(tensor, plan.cut(size), plan.dim))


def _split_parts(value: Any, kind: ContainerKind, plan: _Plan, path: str) -> Sequence[Any]:
    parts, before = contents(value, kind), len(plan.cuts)
    split = [_split(part, plan, path + step(kind, key)) for key, part in parts.items()]
    is_plain = isinstance(value, (dict, list, tuple))
    if not parts or (not is_plain and len(plan.cuts) == before):
        # nothing to split: an object without tensors is passed on as it is
        return [value] * plan.chunks
    # Parts with a cut have the agreed number of pieces, or `agreed` will raise; other parts have
    # one copy per device. So ending with the shortest drops copies, never rows.
    return [
        _like(value, kind, dict(zip(parts, pieces, strict=True)))
        for pieces in zip(*split, strict=False)
    ]


def _like(value: Any, kind: ContainerKind, parts: dict[Any, Any]) -> Any:
    # subclasses become plain, as upstream
    if kind is ContainerKind.SEQUENCE and not is_namedtuple(value):
        return tuple(parts.values()) if isinstance(value, tuple) else list(parts.values())
    return container_like(value, kind, parts)
