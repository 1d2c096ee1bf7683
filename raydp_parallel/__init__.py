"""Wrap a PyTorch model once, and a Ray cluster's GPUs run it, exactly as `torch.nn.DataParallel`
would.
"""

from __future__ import annotations

from raydp_parallel.batch import ChunkRefs, gather, register_batch_type, scatter, scatter_kwargs
from raydp_parallel.calls.executor import Executor, shutdown
from raydp_parallel.data_parallel import DataParallel, data_parallel
from raydp_parallel.errors import (
    ClusterError,
    ExecutorClosed,
    ForkedProcess,
    GraphLost,
    GroupBroken,
    ParallelError,
    PlacementError,
    ReplicaDied,
    ReplicaError,
    ReplicaExit,
    RestartsSpent,
    SourceMismatch,
    StateChanged,
    StateLost,
    TransferError,
)
from raydp_parallel.functional import RemoteReplica, parallel_apply, replicate
from raydp_parallel.monitoring.stats import (
    Advice,
    DriverSeconds,
    ExecutorStats,
    PhaseSeconds,
    ReplicaInfo,
    ReplicaStats,
)
from raydp_parallel.options import Options
from raydp_parallel.progress import Progress
from raydp_parallel.replica.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__version__ = "1.0.0rc1"

__all__ = [
    "Advice",
    "ChunkRefs",
    "ClusterError",
    "DataParallel",
    "DriverSeconds",
    "Executor",
    "ExecutorClosed",
    "ExecutorStats",
    "ForkedProcess",
    "GraphLost",
    "GroupBroken",
    "Options",
    "ParallelError",
    "PhaseSeconds",
    "PlacementError",
    "Progress",
    "RemoteReplica",
    "ReplicaDied",
    "ReplicaError",
    "ReplicaExit",
    "ReplicaInfo",
    "ReplicaStats",
    "RestartsSpent",
    "SourceMismatch",
    "StateChanged",
    "StateLost",
    "SyncBatchNorm",
    "TransferError",
    "convert_sync_batchnorm",
    "data_parallel",
    "gather",
    "parallel_apply",
    "register_batch_type",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "shutdown",
]
