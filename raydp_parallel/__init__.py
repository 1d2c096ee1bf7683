"""Wrap a PyTorch model once, and a Ray cluster's GPUs run it, exactly as `torch.nn.DataParallel`
would.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raydp_parallel import errors
from raydp_parallel.errors import ClusterError as ClusterError
from raydp_parallel.errors import ExecutorClosed as ExecutorClosed
from raydp_parallel.errors import ForkedProcess as ForkedProcess
from raydp_parallel.errors import GraphLost as GraphLost
from raydp_parallel.errors import NoRoom as NoRoom
from raydp_parallel.errors import ParallelError as ParallelError
from raydp_parallel.errors import PlacementError as PlacementError
from raydp_parallel.errors import ReplicaDied as ReplicaDied
from raydp_parallel.errors import ReplicaError as ReplicaError
from raydp_parallel.errors import ReplicaExit as ReplicaExit
from raydp_parallel.errors import SourceMismatch as SourceMismatch
from raydp_parallel.errors import StateChanged as StateChanged
from raydp_parallel.errors import StateLost as StateLost
from raydp_parallel.errors import TransferError as TransferError

if TYPE_CHECKING:
    from raydp_parallel.batch import ChunkRefs, gather, register_batch_type, scatter, scatter_kwargs
    from raydp_parallel.driver.executor import Executor, shutdown
    from raydp_parallel.functional import parallel_apply, replicate
    from raydp_parallel.monitoring.stats import ExecutorStats
    from raydp_parallel.options import Options
    from raydp_parallel.replica.sync_batch_norm import convert_sync_batchnorm
    from raydp_parallel.wrapper import DataParallel, data_parallel

__version__ = "1.0.0rc2"

__all__ = [
    "ChunkRefs",
    "DataParallel",
    "Executor",
    "ExecutorStats",
    "Options",
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
__all__ += [name for name, value in vars(errors).items() if isinstance(value, type)]

_HOMES = ("wrapper", "functional", "driver.executor", "batch", "replica.sync_batch_norm")


def __getattr__(name: str) -> Any:
    """Import torch with the first name that is used: the command needs none."""
    for home in _HOMES if name in __all__ else ():
        found = vars(importlib.import_module(f"{__name__}.{home}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
