"""Packed sequences, split and joined by sequence; upstream cuts their rows and their batch sizes
alike (pytorch#31422).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


def sequences(packed: PackedSequence) -> int:
    """How many sequences there are."""
    return int(packed.batch_sizes[0])


def split_packed(
    packed: PackedSequence, cut: Callable[[Tensor, int], Sequence[Tensor]]
) -> list[PackedSequence]:
    """Pack the sequences of each chunk anew; ``cut`` splits a tensor along a dimension."""
    padded, lengths = pad_packed_sequence(packed)
    pieces = cut(padded, 1)
    counts = lengths.split([piece.size(1) for piece in pieces])
    in_order = packed.sorted_indices is None
    pairs = zip(pieces, counts, strict=True)
    return [pack_padded_sequence(*pair, enforce_sorted=in_order) for pair in pairs]


def join_packed(parts: Sequence[PackedSequence], data: Tensor) -> PackedSequence:
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
