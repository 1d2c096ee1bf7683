"""Packed sequences, split and joined by sequence; upstream cuts their rows and their batch sizes
alike (pytorch#31422).

Row (t, r) lies at ``offset[t] + r``: time step t of the sequence of rank r, ranks going from the
longest to the shortest. ``unsorted_indices`` gives the rank of the user's i-th sequence, None where
it is i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def sequences(packed: PackedSequence) -> int:
    """How many sequences there are."""
    return int(packed.batch_sizes[0])


def ranks_of(packed: PackedSequence) -> Tensor:
    """The rank of each of the user's sequences, on the CPU, where batch_sizes is."""
    if packed.unsorted_indices is None:
        return torch.arange(sequences(packed), device="cpu")
    return packed.unsorted_indices.cpu()


def take(packed: PackedSequence, ranks: Tensor) -> PackedSequence:
    """The sequences of these ranks, in this order."""
    kept, order = ranks.sort()  # ascending ranks: still from the longest to the shortest
    present = kept < packed.batch_sizes.unsqueeze(1)  # [time, sequence]
    rows = (_offsets(packed).unsqueeze(1) + kept)[present]
    batch_sizes = present.sum(1)
    data = packed.data.index_select(0, rows.to(packed.data.device))
    known = None if packed.sorted_indices is None else order
    return _packed(data, batch_sizes[batch_sizes > 0], known)


def join_packed(parts: Sequence[PackedSequence], data: Tensor) -> PackedSequence:
    """One packed sequence of all parts' sequences, in the order of the parts.

    Args:
        parts: The outputs of the replicas.
        data: The parts' data, one after the other.
    """
    lengths, rows = _layout(parts)
    # As torch packs them, sequences of one length too: targets packed by it are in the same order.
    order = torch.sort(lengths, descending=True).indices
    unsorted = any(part.sorted_indices is not None for part in parts)
    present = torch.arange(rows.shape[0], device="cpu").unsqueeze(1) < lengths[order]
    taken = rows[:, order][present]
    known = order if unsorted or bool((lengths.diff() > 0).any()) else None
    return _packed(data.index_select(0, taken.to(data.device)), present.sum(1), known)


def _layout(parts: Sequence[PackedSequence]) -> tuple[Tensor, Tensor]:
    """The length of each sequence, and [time, sequence] the row of the joined data where that step
    is.
    """
    steps = max(len(part.batch_sizes) for part in parts)
    lengths, rows, base = [], [], 0
    for part in parts:
        ranks, offsets = ranks_of(part), _offsets(part)
        lengths.append((ranks < part.batch_sizes.unsqueeze(1)).sum(0))
        # Steps beyond the last one of this part are never looked up, so any number serves.
        padded = torch.nn.functional.pad(offsets, (0, steps - len(offsets)))
        rows.append(base + padded.unsqueeze(1) + ranks)
        base += int(part.batch_sizes.sum())
    return torch.cat(lengths), torch.cat(rows, 1)


def _offsets(packed: PackedSequence) -> Tensor:
    """The first row of each time step."""
    return packed.batch_sizes.cumsum(0) - packed.batch_sizes


def _packed(data: Tensor, batch_sizes: Tensor, order: Tensor | None) -> PackedSequence:
    return PackedSequence(data, batch_sizes, None if order is None else order.to(data.device))
