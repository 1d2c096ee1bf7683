"""Wrap a PyTorch model once, and a Ray cluster's GPUs run it, exactly as `torch.nn.DataParallel`
would.
"""

from __future__ import annotations

from raydp_parallel.batch import ChunkRefs, gather, register_batch_type, scatter
from raydp_parallel.data_parallel import DataParallel, data_parallel
from raydp_parallel.driver.executor import Executor, shutdown
from raydp_parallel.errors import (
    ClusterError,
    ExecutorClosed,
    ForkedProcess,
    GraphLost,
    ParallelError,
    PlacementError,
    ReplicaDied,
    ReplicaError,
    SourceMismatch,
    StateChanged,
    StateLost,
    TransferError,
)
from raydp_parallel.functional import parallel_apply, replicate
from raydp_parallel.functional import scatter_kwargs as scatter_kwargs
from raydp_parallel.monitoring.stats import ExecutorStats
from raydp_parallel.options import Options
from raydp_parallel.replica.sync_batch_norm import convert_sync_batchnorm

__version__ = "1.0.0rc2"

__all__ = [
    "ChunkRefs",
    "ClusterError",
    "DataParallel",
    "Executor",
    "ExecutorClosed",
    "ExecutorStats",
    "ForkedProcess",
    "GraphLost",
    "Options",
    "ParallelError",
    "PlacementError",
    "ReplicaDied",
    "ReplicaError",
    "SourceMismatch",
    "StateChanged",
    "StateLost",
    "TransferError",
    "convert_sync_batchnorm",
    "data_parallel",
    "gather",
    "parallel_apply",
    "register_batch_type",
    "replicate",
    "scatter",
    "shutdown",
]
