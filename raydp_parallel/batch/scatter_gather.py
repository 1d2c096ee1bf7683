"""Scatter and gather: one value into one value per chunk, and one value per chunk into one value.

Tensors are split and joined with torch's own operations, so that autograd works through them. What
a value is made of is in `containers`.

Upstream splits each tensor separately and zips the pieces, so arguments of different sizes lose
rows silently (pytorch#7358, #31460). Here each cut is noted, and cuts that disagree raise an error
before anything runs. Chunks have as many rows as others or follow weights, and never fewer than a
bound (pytorch#34516, #46381, #35118, #18563).

A packed sequence is split and joined by sequence; upstream cuts its rows and its batch sizes alike
(pytorch#31422). It holds row (t, r) at ``offset[t] + r``: time step t of the sequence of rank r,
ranks going from the longest to the shortest. ``unsorted_indices`` gives the rank of the user's i-th
sequence, None where it is i.

Upstream takes the kind of a gathered value from replica 0 alone, and iterates over types that it
does not know: a string becomes the text of a map object, a None hides another replica's tensor.
Here the values of all replicas are compared, and leaves come back as a list.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raydp_parallel import devices
from raydp_parallel.batch.containers import (
    ContainerKind,
    container_like,
    contents,
    is_namedtuple,
    iterates_over_tensors,
    joiner_of,
    kind_of,
    registered,
    splitter_of,
    step,
    takes_sizes,
)
from raydp_parallel.devices import output_place
from raydp_parallel.devices.ambient_state import uncompiled
from raydp_parallel.options import Scalars

Cut = int | list[int]
"""The most chunks that `torch.chunk` makes; or the size of each chunk."""


class Scatter(torch.autograd.Function):
    """Chunks of a tensor, as views; its backward is a concatenation, so it is differentiable any
    number of times.
    """

    @staticmethod
    def forward(ctx: Any, cut: Cut, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split ``tensor``."""
        # Without this, a chunk without a gradient would arrive as zeros, and "no gradient at all"
        # could not be told from that.
        ctx.set_materialize_grads(False)
        views = _views(tensor, cut, dim)
        ctx.dim, ctx.sizes = dim, [view.shape for view in views]
        return views

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        """Put the chunks' gradients one after the other; chunks without one count as zero."""
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            return None, None, None
        whole = [
            known.new_zeros(size) if grad is None else grad
            for grad, size in zip(grads, ctx.sizes, strict=True)
        ]
        return None, None, join_along(whole, ctx.dim)


class Gather(torch.autograd.Function):
    """``torch.cat`` into memory that was used before; its backward is made of views, as that of
    ``torch.cat`` is.
    """

    @staticmethod
    def forward(ctx: Any, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Concatenate."""
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.sizes = dim, [tensor.shape[dim] for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(ctx.sizes)
        return torch.cat(tensors, dim, out=devices.recycled(shape, tensors[0].dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Split."""
        (grad,) = grads
        return None, *([None] * len(ctx.sizes) if grad is None else grad.split(ctx.sizes, ctx.dim))


def join_along(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The concatenation of tensors of one dtype and device."""
    size = sum([tensor.numel() * tensor.itemsize for tensor in tensors])
    if size >= devices.RECYCLED and all(map(_is_plain, tensors)):
        joined: torch.Tensor = Gather.apply(dim, *tensors)
        return joined
    return torch.cat(tuple(tensors), dim)


def _is_plain(tensor: torch.Tensor) -> bool:
    ordinary = (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and devices.is_cpu(tensor.device)
    )
    return ordinary and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def split_tensor(tensor: torch.Tensor, cut: Cut, dim: int) -> tuple[torch.Tensor, ...]:
    """Views of a tensor along ``dim``."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _views(tensor, cut, dim)
    views: tuple[torch.Tensor, ...] = Scatter.apply(cut, dim, tensor)
    return views


def _views(tensor: torch.Tensor, cut: Cut, dim: int) -> tuple[torch.Tensor, ...]:
    return tensor.chunk(cut, dim) if isinstance(cut, int) else tensor.split(cut, dim)


def sequences(packed: PackedSequence) -> int:
    """How many sequences there are."""
    return int(packed.batch_sizes[0])


def split_packed(packed: PackedSequence, cut: Cut) -> list[PackedSequence]:
    """Chunks of the user's sequences, in the user's order."""
    return [_take(packed, ranks) for ranks in split_tensor(_ranks(packed), cut, 0)]


def _take(packed: PackedSequence, ranks: Tensor) -> PackedSequence:
    kept, order = ranks.sort()  # ascending ranks: still from the longest to the shortest
    present = kept < packed.batch_sizes.unsqueeze(1)  # [time, sequence]
    rows = (_offsets(packed).unsqueeze(1) + kept)[present]
    batch_sizes = present.sum(1)
    data = packed.data.index_select(0, rows.to(packed.data.device))
    return _packed(
        data, batch_sizes[batch_sizes > 0], None if packed.sorted_indices is None else order
    )


def join_packed(parts: Sequence[PackedSequence], data: Tensor) -> PackedSequence:
    """One packed sequence of all parts' sequences, in the order of the parts.

    Args:
        parts: What the replicas returned.
        data: The parts' data, one after the other.
    """
    lengths, rows = _layout(parts)
    # As torch packs them, sequences of one length too: targets packed by it are in the same order.
    order = torch.sort(lengths, descending=True).indices
    sorted_already = all(part.sorted_indices is None for part in parts) and bool(
        (lengths.diff() <= 0).all()
    )
    present = torch.arange(rows.shape[0], device="cpu").unsqueeze(1) < lengths[order]
    taken = rows[:, order][present]
    return _packed(
        data.index_select(0, taken.to(data.device)),
        present.sum(1),
        None if sorted_already else order,
    )


def _layout(parts: Sequence[PackedSequence]) -> tuple[Tensor, Tensor]:
    """The length of each sequence, and [time, sequence] the row of the joined data where that step
    is.
    """
    steps = max(len(part.batch_sizes) for part in parts)
    lengths, rows, base = [], [], 0
    for part in parts:
        ranks, offsets = _ranks(part), _offsets(part)
        lengths.append((ranks < part.batch_sizes.unsqueeze(1)).sum(0))
        # Steps beyond the last one of this part are never looked up, so any number serves.
        padded = torch.nn.functional.pad(offsets, (0, steps - len(offsets)))
        rows.append(base + padded.unsqueeze(1) + ranks)
        base += int(part.batch_sizes.sum())
    return torch.cat(lengths), torch.cat(rows, 1)


def _ranks(packed: PackedSequence) -> Tensor:
    """The rank of each of the user's sequences, on the CPU, where batch_sizes is."""
    if packed.unsorted_indices is None:
        return torch.arange(sequences(packed), device="cpu")
    return packed.unsorted_indices.cpu()


def _offsets(packed: PackedSequence) -> Tensor:
    """The first row of each time step."""
    return packed.batch_sizes.cumsum(0) - packed.batch_sizes


def _packed(data: Tensor, batch_sizes: Tensor, sorted_indices: Tensor | None) -> PackedSequence:
    return PackedSequence(
        data, batch_sizes, None if sorted_indices is None else sorted_indices.to(data.device)
    )


ChunkSizes = Callable[[int], list[int]]
"""The rows of each chunk, for a number of rows."""


def even_sizes(rows: int, chunks: int) -> list[int]:
    """The rows of each chunk as `torch.chunk` cuts them; no rows are that many empty chunks."""
    if rows == 0:
        return [0] * chunks
    size = math.ceil(rows / chunks)
    return [min(size, rows - start) for start in range(0, rows, size)]


def weighted_sizes(
    rows: int, chunks: int, weights: Sequence[float] | None = None, least: int = 1
) -> list[int]:
    """The rows of each chunk, in the order of chunks.

    There are fewer chunks where there are not enough rows for the bound, the first ones then, and a
    single one if there are fewer rows than the bound itself.

    Args:
        rows: How many rows there are.
        chunks: The most chunks.
        weights: What the chunks' rows are in proportion to; None cuts as `torch.chunk` does, if
            that leaves no chunk below the bound, and else as evenly as can be.
        least: The fewest rows of a chunk.
    """
    upstream = even_sizes(rows, chunks)
    if rows == 0 or (weights is None and min(upstream) >= least):
        return upstream
    count = max(1, min(chunks, rows // least))
    shares = _shares(rows, [*weights][:count] if weights is not None else [1.0] * count, least)
    return _rounded(rows, shares)


def _shares(rows: int, weights: Sequence[float], least: int) -> list[float]:
    """Shares of the rows in proportion to weights, none below the bound."""
    most = max(weights)
    weights = [weight / most for weight in weights]
    raised: set[int] = set()
    while True:
        free = [i for i in range(len(weights)) if i not in raised]
        left = rows - least * len(raised)
        total = math.fsum(weights[i] for i in free)
        shares = [float(least)] * len(weights)
        for i in free:
            shares[i] = left * (weights[i] / total)
        low = {i for i in free if shares[i] < least}
        if not low or len(free) == 1:
            return shares
        raised |= low


def _rounded(rows: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers next to the shares; those with the largest fractions get what is left."""
    sizes = [int(share) for share in shares]
    fractions = [size - share for size, share in zip(sizes, shares, strict=True)]
    order = sorted(range(len(shares)), key=fractions.__getitem__)
    for i in order[: rows - sum(sizes)]:
        sizes[i] += 1
    return sizes


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
        if not chunks:
            raise RuntimeError("Expected at least one device to scatter to")
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
    plan = _Plan(len(target_gpus), dim)
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
            tensors of different sizes, or a value of a class that splits it without them.
    """
    if not inputs and not kwargs:
        return (), ()
    plan = _Plan(len(target_gpus), dim, sizes)
    # nearly every call
    plain = not kwargs and {*map(type, inputs)} == {Tensor}
    if plain and (not registered or splitter_of(inputs[0]) is None):
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


@uncompiled
def gather(
    outputs: Iterable[Any],
    target_device: int | str | torch.device,
    dim: int = 0,
    *,
    scalars: Scalars = "vector",
    weights: Sequence[float] | None = None,
) -> Any:
    """Join what the replicas returned, leaf by leaf.

    Tensors are concatenated; None stays None; other leaves (numbers, strings, arrays) become a list
    with one entry per chunk. Containers, UserDicts, dataclasses and packed sequences are made
    again, of replica 0's class; so are other iterables with tensors in them, if their class can be
    called with a list of the parts.

    Args:
        outputs: One value per chunk.
        target_device: Where the result goes; an int is a CUDA index.
        dim: The dimension along which tensors are joined.
        scalars: What 0-dim tensors become: a vector, with upstream's warning, or one 0-dim tensor:
            their mean, their sum, or their mean weighted by ``weights``.
        weights: The size of each chunk; None counts all alike.

    Returns:
        The joined value.

    Raises:
        ValueError: The replicas' outputs do not fit together, or ``scalars`` or ``weights`` make no
            sense.
        KeyError: A dict lacks a key that replica 0 has.
        IndexError: A tensor lacks the dimension.
        RuntimeError: Tensors differ in another dimension.
    """
    outs = list(outputs)
    if not outs:
        raise ValueError("there is nothing to gather: expected one output per chunk, got none")
    if scalars not in SCALARS:
        raise ValueError(f"scalars={scalars!r}, expected one of {', '.join(map(repr, SCALARS))}")
    how = Gathering(output_place(target_device), dim, scalars, _weights_of(weights, len(outs)))
    return _join(outs, how, "output")


def _weights_of(weights: Sequence[float] | None, chunks: int) -> tuple[float, ...]:
    if weights is None:
        return (1 / chunks,) * chunks
    if len(weights) != chunks:
        raise ValueError(f"got {len(weights)} weights for {chunks} chunks")
    total = float(sum(weights))
    # An empty batch has chunks of no rows.
    return tuple(float(weight) / total for weight in weights) if total else (1 / chunks,) * chunks


def _join(outs: list[Any], how: Gathering, path: str) -> Any:
    # nearly every call
    if {*map(type, outs)} == {Tensor} and (not registered or joiner_of(outs[0]) is None):
        return join_tensors(outs, how)
    joiners = [joiner_of(out) for out in outs]
    if any(joiner is not None for joiner in joiners):
        return _join_custom(outs, joiners, how, path)
    kind = _common_kind(outs, path)
    if kind is ContainerKind.TENSOR:
        return join_tensors(outs, how)
    if kind is ContainerKind.PACKED:
        return join_packed(outs, join_tensors([out.data for out in outs], how._replace(dim=0)))
    if kind is ContainerKind.NONE:
        return None
    return outs if kind is ContainerKind.LEAF else _join_parts(outs, kind, how, path)


def _join_custom(outs: list[Any], joiners: list[Any], how: Gathering, path: str) -> Any:
    if any(joiner is None for joiner in joiners):
        raise _unlike(outs, path)
    return joiners[0](outs, how.place, how.dim)


def _join_parts(outs: list[Any], kind: ContainerKind, how: Gathering, path: str) -> Any:
    held = [contents(out, kind) for out in outs]
    _check_lengths(held, kind, path)
    keys = held[0]
    parts = {
        key: _join([parts[key] for parts in held], how, path + step(kind, key)) for key in keys
    }
    if isinstance(outs[0], (set, frozenset)):
        return type(outs[0])(parts.values())
    try:
        return container_like(outs[0], kind, parts)
    except Exception:  # the class cannot be made of its parts
        if kind is ContainerKind.ITERABLE:
            return outs
        raise


def _common_kind(outs: list[Any], path: str) -> ContainerKind:
    """The kind of all outputs.

    Raises:
        ValueError: They differ.
    """
    kinds = {_output_kind(out, path) for out in outs}
    if kinds == {ContainerKind.NONE, ContainerKind.LEAF}:
        return ContainerKind.LEAF
    if len(kinds) > 1 or (kinds == {ContainerKind.FIELDS} and len({type(out) for out in outs}) > 1):
        raise _unlike(outs, path)
    return kinds.pop()


def _output_kind(out: Any, path: str) -> ContainerKind:
    """As `kind_of`, with the kinds that upstream joins but does not split: deques, user lists, sets
    of tensors, iterables.
    """
    if isinstance(out, torch.Size):  # a tuple of numbers that can hold nothing else
        return ContainerKind.LEAF
    if isinstance(out, (deque, UserList)):
        return ContainerKind.SEQUENCE
    if isinstance(out, (set, frozenset)) and any(isinstance(part, torch.Tensor) for part in out):
        if len(out) > 1:  # tensors hash by address, so they cannot be matched
            raise ValueError(
                f"{path}: a set of {len(out)} tensors has no order to gather by; return a list or "
                "dict"
            )
        return ContainerKind.SEQUENCE
    kind = kind_of(out)
    if kind is ContainerKind.LEAF and iterates_over_tensors(out):
        return ContainerKind.ITERABLE
    return kind


def _check_lengths(held: list[dict[Any, Any]], kind: ContainerKind, path: str) -> None:
    lengths = [len(parts) for parts in held]
    if len(set(lengths)) == 1:
        return
    if kind is ContainerKind.MAPPING:
        raise ValueError("All dicts must have the same number of keys")
    raise ValueError(
        f"{path}: replicas returned different numbers of items: {', '.join(map(str, lengths))}"
    )


def _unlike(outs: list[Any], path: str) -> ValueError:
    first, *others = map(_named, outs)
    seen = [f"replica 0 returned {first}"]
    seen += [f"replica {index} {name}" for index, name in enumerate(others, 1)]
    return ValueError(
        f"{path}: {', '.join(seen)}; all replicas have to return the same kind of value"
    )


def _named(out: Any) -> str:
    return "None" if out is None else f"a {type(out).__name__}"
