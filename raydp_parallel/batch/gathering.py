"""Gather: one value per chunk into one value.

Upstream takes the kind of the value from replica 0 alone, and iterates over types that it does not
know: a string becomes the text of a map object, a None hides another replica's tensor. Here the
values of all replicas are compared, and leaves come back as a list.
"""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from raydp_parallel.batch.containers import (
    ContainerKind,
    container_like,
    contents,
    iterates_over_tensors,
    kind_of,
    step,
)
from raydp_parallel.batch.custom_types import joiner_of
from raydp_parallel.batch.packed import join_packed
from raydp_parallel.batch.tensor_joining import SCALARS, Gathering, join_tensors
from raydp_parallel.devices import output_place
from raydp_parallel.devices.ambient_state import uncompiled
from raydp_parallel.options import Scalars


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
    how = Gathering(output_place(target_device), dim, scalars, _shares(weights, len(outs)))
    return _join(outs, how, "output")


def _shares(weights: Sequence[float] | None, chunks: int) -> tuple[float, ...]:
    if weights is None:
        return (1 / chunks,) * chunks
    if len(weights) != chunks:
        raise ValueError(f"got {len(weights)} weights for {chunks} chunks")
    total = float(sum(weights))
    # An empty batch has chunks of no rows.
    return tuple(float(weight) / total for weight in weights) if total else (1 / chunks,) * chunks


def _join(outs: list[Any], how: Gathering, path: str) -> Any:
    # nearly every call
    if all(type(out) is torch.Tensor for out in outs) and joiner_of(outs[0]) is None:
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
