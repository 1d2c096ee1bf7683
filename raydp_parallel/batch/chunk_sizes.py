"""How many rows each chunk of a batch gets: as many as another, or in proportion to weights, and
never fewer than a bound (pytorch#34516, #46381, #35118, #18563).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
