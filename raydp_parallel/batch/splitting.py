"""Scatter: one value into one value per chunk.

Upstream splits each tensor by itself and zips the pieces, so arguments of different sizes lose rows
silently (pytorch#7358, #31460). Here each cut is noted, and cuts that disagree raise an error.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from raydp_parallel.batch import containers
from raydp_parallel.batch.containers import ContainerKind, Keywords
from raydp_parallel.devices.ambient import uncompiled

Warn = Callable[[str, str], object]
"""Takes a warning and the name of its kind."""


def weighted_sizes(rows: int, chunks: int, weights: Sequence[float]) -> list[int]:
    """The rows of each chunk, in proportion to weights and at least one; there are fewer chunks
    than weights where there are fewer rows.
    """
    if rows == 0:
        return [0] * chunks
    weights = [weight / max(weights) for weight in weights[: min(chunks, rows)]]
    shares = [rows * (weight / math.fsum(weights)) for weight in weights]
    sizes = [max(1, int(share)) for share in shares]
    while sum(sizes) != rows:  # at most once for each chunk
        more = sum(sizes) < rows
        lacking = [share - size for share, size in zip(shares, sizes, strict=True)]
        chosen = [i for i, size in enumerate(sizes) if more or size > 1]
        sizes[(max if more else min)(chosen, key=lacking.__getitem__)] += 1 if more else -1
    return sizes


@dataclass
class _Cutting:
    """How values are cut, and the cuts made so far: path, size (None if a rule cut it), chunks."""

    chunks: int
    dim: int
    weights: Sequence[float] | None = None
    cuts: list[tuple[str, int | None, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.chunks:
            raise RuntimeError("Expected at least one device to scatter to")

    def sizes(self, rows: int) -> list[int]:
        """The rows of each chunk: as `torch.chunk` cuts them, or in proportion to weights."""
        if self.weights is not None:
            return weighted_sizes(rows, self.chunks, self.weights)
        return [len(part) for part in torch.empty(rows, device="meta").chunk(self.chunks)]

    def views(self, tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Cut a tensor, as torch's autograd can follow."""
        if self.weights is None:
            return tensor.chunk(self.chunks, dim)
        pieces: tuple[Tensor, ...] = tensor.split(self.sizes(tensor.size(dim)), dim)
        return pieces

    def agreed(self, warn: Warn | None = None) -> int:
        """The number of chunks, which all cuts must have in common; without any, a copy for each
        device.
        """
        counts = {chunks for _, _, chunks in self.cuts} or {self.chunks}
        cuts = "; ".join(
            f"{path}: {'' if size is None else f'size {size}, '}{n} chunk{'s' * (n != 1)}"
            for path, size, n in self.cuts
        )
        if len(counts) > 1:
            raise ValueError(
                f"arguments split into different numbers of chunks along dim {self.dim} over "
                f"{self.chunks} devices, so rows would be lost: {cuts}. Give all of them one size; "
                "what every replica needs whole may be a 0-dim tensor or no tensor at all."
            )
        differ = len({size for _, size, _ in self.cuts} - {None}) > 1
        text = (
            f"arguments have different sizes along dim {self.dim}, so that chunks of different "
            f"sizes are paired, which may broadcast: {cuts}. If rows are to belong together, give "
            "all arguments one size"
        )
        if differ and self.weights is not None:
            raise ValueError(f"chunk_weights: {text}")
        if warn is not None and self.chunks > 1:
            if differ:  # some programs mean that, and torch.nn.DataParallel pairs them so
                warn(text, "_warned_of_sizes")
            if not self.cuts:
                warn(
                    "only tensors are split: each replica received the whole arguments, as with "
                    "torch.nn.DataParallel, so rows of a list or an array are duplicated. Give "
                    "tensors, or a class that register_batch_type makes known",
                    "_warned_of_copies",
                )
        return counts.pop()


@uncompiled
def scatter(inputs: object, target_gpus: Sequence[object], dim: int = 0) -> Any:
    """Split the tensors in a nested value into chunks, views on their own device; other values go
    to every chunk.

    Tensors are split as ``torch.chunk`` does, so there may be fewer chunks than devices; 0-dim
    tensors go to every chunk. Containers, UserDicts and dataclasses are copied for each chunk,
    packed sequences split by sequence. Of ``target_gpus`` only the number matters. As upstream, a
    tensor gives a tuple of chunks, all else a list.
    """
    cut = _Cutting(len(target_gpus), dim)
    pieces = _split(inputs, cut, "inputs")
    cut.agreed()  # raises where rows would be lost
    return tuple(pieces) if isinstance(inputs, Tensor) else list(pieces)


@uncompiled
def scatter_kwargs(
    inputs: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
    target_gpus: Sequence[object],
    dim: int = 0,
    *,
    warn: Warn | None = None,
    weights: Sequence[float] | None = None,
) -> tuple[tuple[Any, ...], tuple[Keywords, ...]]:
    """Split positional and keyword arguments together, as `scatter`, so that both results have one
    entry per chunk, or none if there are no arguments at all.

    ``warn`` gets texts, with a name for each kind, of arguments that may not be split as meant.
    ``weights`` are the proportions of the chunks' rows, one for each; all arguments must have one
    size then.
    """
    if not inputs and not kwargs:
        return (), ()
    cut = _Cutting(len(target_gpus), dim, weights)
    positional = _split(inputs, cut, "inputs") if inputs else [()] * cut.chunks
    keyword = _split(kwargs, cut, "kwargs") if kwargs else [{} for _ in range(cut.chunks)]
    chunks = cut.agreed(warn)
    return tuple(positional[:chunks]), tuple(keyword[:chunks])


def sizes(value: object, dim: int) -> Iterator[int]:
    """The sizes of a chunk's tensors along the dimension along which the batch was split. The first
    one is how many rows it has.
    """
    for leaf in containers.leaves(value):
        if isinstance(leaf, PackedSequence):
            yield int(leaf.batch_sizes[0])
        elif isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim():
            yield leaf.size(dim)


def _split(value: object, cut: _Cutting, path: str) -> Sequence[Any]:
    rule, size = containers.rules_of(type(value))[0], None
    if rule is not None:
        extra = {"sizes": cut.sizes} if "sizes" in inspect.signature(rule).parameters else {}
        if cut.weights is not None and not extra:
            raise ValueError(
                f"{path} is split by a rule of its class that takes no sizes, so it cannot be "
                "split with chunk_weights: give the rule a parameter sizes, a function from a "
                "number of rows to the rows of each chunk"
            )
        pieces = list(rule(value, cut.chunks, cut.dim, **extra))
        if not 1 <= len(pieces) <= cut.chunks:
            raise ValueError(
                f"{path} was split by its own rule into {len(pieces)} chunks, "
                f"expected 1 to {cut.chunks}"
            )
    elif isinstance(value, PackedSequence):
        # Upstream cuts their rows and their batch sizes alike (pytorch#31422).
        size, (padded, lengths) = int(value.batch_sizes[0]), pad_packed_sequence(value)
        in_order = value.sorted_indices is None
        pairs = zip(cut.views(padded, 1), cut.views(lengths, 0), strict=True)
        pieces = [pack_padded_sequence(*pair, enforce_sorted=in_order) for pair in pairs]
    elif isinstance(value, Tensor) and value.dim():
        try:
            size, pieces = value.size(cut.dim), [*cut.views(value, cut.dim)]
        except IndexError as error:
            shape = tuple(value.shape)
            raise IndexError(f"{error}: {path} has shape {shape} and cannot be split") from None
    else:
        return _split_parts(value, cut, path)
    cut.cuts.append((path, size, len(pieces)))
    return pieces


def _split_parts(value: object, cut: _Cutting, path: str) -> Sequence[object]:
    kind, before = containers.kind_of(value), len(cut.cuts)
    parts = containers.contents(value, kind)
    split = [_split(part, cut, path + containers.step(kind, key)) for key, part in parts.items()]
    is_plain = isinstance(value, (dict, list, tuple))
    if not parts or (not is_plain and len(cut.cuts) == before):
        # nothing to split: an object without tensors is passed on as it is
        return [value] * cut.chunks
    if kind is ContainerKind.SEQUENCE and not containers.is_namedtuple(value):
        value = () if isinstance(value, tuple) else []  # subclasses become plain, as upstream
    # Parts with a cut have the agreed number of pieces, or `agreed` will raise; other parts have
    # one copy per device. So ending with the shortest drops copies, never rows.
    chunks = [dict(zip(parts, chunk, strict=True)) for chunk in zip(*split, strict=False)]
    return [containers.container_like(value, kind, chunk) for chunk in chunks]
