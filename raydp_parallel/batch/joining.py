"""Gather: one value per chunk into one value.

Upstream takes the kind of a gathered value from replica 0 alone, and iterates over types that it
does not know. Here the values of all replicas are compared, and leaves come back as a list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from raydp_parallel.batch import containers
from raydp_parallel.batch.containers import ContainerKind
from raydp_parallel.devices.ambient import uncompiled
from raydp_parallel.errors import warn
from raydp_parallel.options import Scalars


class _How(NamedTuple):
    place: torch.device
    dim: int
    scalars: Scalars
    weights: Sequence[float] | None


def output_place(target: int | str | torch.device) -> torch.device:
    """The driver's device that a ``target_device`` or ``output_device`` names.

    Device ids are logical here, so on a driver without CUDA every index names the CPU, where the
    module of such a driver lies.
    """
    if target == -1:
        warn(
            "Using -1 to represent CPU tensor is deprecated. Please use a "
            'device object or string instead, e.g., "cpu".',
            FutureWarning,
        )
        return torch.device("cpu")
    device = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
    if device.type != "cpu" and not torch.cuda.is_available():
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:  # which torch's stubs leave out
        return torch.device("cuda", torch.cuda.current_device())  # type: ignore[unreachable]
    return device


@uncompiled
def gather(
    outputs: Iterable[object],
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
        scalars: The form of 0-dim tensors: a vector, with upstream's warning, or their mean.
        weights: The rows of each chunk, by which a mean is weighted; None counts all alike.
    """
    outs = list(outputs)
    if not outs:
        raise ValueError("there is nothing to gather: expected one output per chunk, got none")
    if scalars not in ("vector", "mean"):
        raise ValueError(f"scalars={scalars!r}, expected 'vector' or 'mean'")
    if weights is not None and len(weights) != len(outs):
        raise ValueError(f"got {len(weights)} weights for {len(outs)} chunks")
    return _join(outs, _How(output_place(target_device), dim, scalars, weights), "output")


def _join(outs: list[Any], how: _How, path: str) -> object:
    joiners = [containers.rules_of(type(out))[1] for out in outs]
    if joiners[0] is not None and None not in joiners:
        return joiners[0](outs, how.place, how.dim)
    if any(joiners):
        raise _unlike(outs, path)
    kinds = {_output_kind(out, path) for out in outs}
    if all(out is None for out in outs):
        return None
    if kinds == {ContainerKind.LEAF}:
        objects = [type(out).__qualname__ for out in outs if hasattr(out, "__dict__")]
        if objects:
            warn(
                f"{path} is of the class {objects[0]}, which is not joined: it is a list with one "
                "for each chunk. Give the class a __gather__, or use register_batch_type"
            )
        return outs
    kind = kinds.pop()
    if kinds or (kind is ContainerKind.FIELDS and len({*map(type, outs)}) > 1):
        raise _unlike(outs, path)
    if kind is ContainerKind.TENSOR:
        return _join_tensors(outs, how)
    if kind is ContainerKind.PACKED:
        return _join_packed(outs, _join_tensors([out.data for out in outs], how._replace(dim=0)))
    return _join_parts(outs, kind, how, path)


def _join_tensors(tensors: Sequence[Tensor], how: _How) -> Tensor:
    """One tensor of all, in the first one's dtype, as upstream's C++ allocates it."""
    scalars = all(tensor.dim() == 0 for tensor in tensors)
    if scalars and how.scalars == "vector" and how.dim == 0:
        warn(
            "Was asked to gather along dimension 0, but all "
            "input tensors were scalars; will instead unsqueeze "
            "and return a vector. "
            "Options(scalars='mean') makes one number of it, as a loss has to be for backward."
        )
        tensors = [scalar.reshape(1) for scalar in tensors]
    placed = [tensor.to(device=how.place, dtype=tensors[0].dtype) for tensor in tensors]
    if scalars and how.scalars == "mean":
        return _mean(torch.stack(placed), how.weights)
    # All sizes but the one along `dim` have to agree: torch.cat would let an empty vector pass.
    expected = list(tensors[0].shape)
    for index, tensor in enumerate(tensors):
        shape = list(tensor.shape)
        if len(shape) == len(expected):
            expected[how.dim] = tensor.size(how.dim)  # raises for a dimension that is not there
        if shape != expected:
            raise RuntimeError(
                f"Input tensor at index {index} has invalid shape {shape}, but expected {expected}"
            )
    return torch.cat(placed, how.dim)


def _mean(scalars: Tensor, weights: Sequence[float] | None) -> Tensor:
    if not (scalars.is_floating_point() or scalars.is_complex()):
        scalars = scalars.to(torch.get_default_dtype())  # a mean of counts is no count
    if weights is None or len({*weights}) == 1:  # an empty batch has chunks of no rows
        return scalars.mean()
    shares = [weight / sum(weights) for weight in weights]
    return (scalars * torch.tensor(shares, dtype=scalars.dtype, device=scalars.device)).sum()


def _join_packed(parts: Sequence[PackedSequence], data: Tensor) -> PackedSequence:
    """One packed sequence of all parts' sequences, in the order of the parts; ``data`` is theirs,
    one after the other.
    """
    longest = max(len(part.batch_sizes) for part in parts)
    padded, lengths = [], []
    rows = data.split([len(part.data) for part in parts])
    for part, own in zip(parts, rows, strict=True):
        part = part.to(data.device)._replace(data=own)  # type: ignore[arg-type]
        found = pad_packed_sequence(part, total_length=longest)
        padded.append(found[0])
        lengths.append(found[1])
    every = torch.cat(lengths)
    # As torch packs them: targets that were packed by it are in the same order.
    in_order = all(part.sorted_indices is None for part in parts)
    in_order = in_order and not bool((every.diff() > 0).any())
    return pack_padded_sequence(torch.cat(padded, 1), every, enforce_sorted=in_order)


def _join_parts(outs: list[object], kind: ContainerKind, how: _How, path: str) -> object:
    held = [containers.contents(out, kind) for out in outs]
    lengths = [len(parts) for parts in held]
    if len({*lengths}) > 1:
        if kind is ContainerKind.MAPPING:
            raise ValueError("All dicts must have the same number of keys")
        seen = ", ".join(map(str, lengths))
        raise ValueError(f"{path}: replicas returned different numbers of items: {seen}")
    parts = {}
    for key in held[0]:
        parts[key] = _join([other[key] for other in held], how, path + containers.step(kind, key))
    # A class that cannot be made of its parts comes as a list.
    with contextlib.suppress(*[Exception] if kind is ContainerKind.ITERABLE else ()):
        return containers.container_like(outs[0], kind, parts)
    return outs


def _output_kind(out: object, path: str) -> ContainerKind:
    """As `kind_of`, with iterables, which upstream joins but does not split."""
    if isinstance(out, torch.Size):  # a tuple of numbers that can hold nothing else
        return ContainerKind.LEAF
    kind = containers.kind_of(out)
    if kind is not ContainerKind.LEAF or not containers.iterates_over_tensors(out):
        return kind
    if isinstance(out, (set, frozenset)) and len(out) > 1:
        # tensors hash by address, so they cannot be matched
        raise ValueError(
            f"{path}: a set of {len(out)} tensors has no order to gather by; return a list or dict"
        )
    return ContainerKind.ITERABLE


def _unlike(outs: list[object], path: str) -> ValueError:
    named = ["None" if out is None else f"a {type(out).__name__}" for out in outs]
    seen = [f"replica {index} {name}" for index, name in enumerate(named[1:], 1)]
    text = ", ".join([f"replica 0 returned {named[0]}", *seen])
    return ValueError(f"{path}: {text}; all replicas have to return the same kind of value")
