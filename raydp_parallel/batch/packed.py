"""PackedSequence, split and joined by sequence; upstream cuts its rows and its batch sizes alike
(pytorch#31422).

A packed sequence holds row (t, r) at ``offset[t] + r``: time step t of the sequence of rank r,
ranks going from the longest to the shortest. ``unsorted_indices`` gives the rank of the user's i-th
sequence, None where it is i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raydp_parallel.batch.autograd_functions import Cut, split_tensor


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
