"""Scatter and gather of nested values: pure functions in the driver, with torch's own autograd."""

from raydp_parallel.batch.chunk_refs import ChunkRefs, holds_refs, preparations, resolved
from raydp_parallel.batch.containers import BatchTypeHandle, register_batch_type, registered
from raydp_parallel.batch.scatter_gather import (
    ChunkSizes,
    gather,
    rows,
    scatter,
    scatter_kwargs,
    sizes,
    weighted_sizes,
)

__all__ = [
    "BatchTypeHandle",
    "ChunkRefs",
    "ChunkSizes",
    "gather",
    "holds_refs",
    "preparations",
    "register_batch_type",
    "registered",
    "resolved",
    "rows",
    "scatter",
    "scatter_kwargs",
    "sizes",
    "weighted_sizes",
]
