"""Wrap a PyTorch model once, and a Ray cluster's GPUs run it, exactly as `torch.nn.DataParallel`
would.
"""

from __future__ import annotations

import importlib
import itertools
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
    from raydp_parallel.batch import gather as gather
    from raydp_parallel.batch import register_batch_type as register_batch_type
    from raydp_parallel.batch import scatter as scatter
    from raydp_parallel.batch import scatter_kwargs as scatter_kwargs
    from raydp_parallel.driver.executor import Executor as Executor
    from raydp_parallel.driver.executor import shutdown as shutdown
    from raydp_parallel.extras.chunk_refs import ChunkRefs as ChunkRefs
    from raydp_parallel.extras.sync_batch_norm import (
        convert_sync_batchnorm as convert_sync_batchnorm,
    )
    from raydp_parallel.functional import parallel_apply as parallel_apply
    from raydp_parallel.functional import replicate as replicate
    from raydp_parallel.monitoring.stats import ExecutorStats as ExecutorStats
    from raydp_parallel.options import Options as Options
    from raydp_parallel.wrapper import DataParallel as DataParallel
    from raydp_parallel.wrapper import data_parallel as data_parallel

__version__ = "1.0.0rc2"

_MODULES = {
    "wrapper": ("DataParallel", "data_parallel"),
    "driver.executor": ("Executor", "shutdown"),
    "options": ("Options",),
    "monitoring.stats": ("ExecutorStats",),
    "functional": ("replicate", "parallel_apply"),
    "batch": ("scatter", "scatter_kwargs", "gather", "register_batch_type"),
    "extras.chunk_refs": ("ChunkRefs",),
    "extras.sync_batch_norm": ("convert_sync_batchnorm",),
}

__all__ = [*itertools.chain(*_MODULES.values())]
__all__ += [name for name, value in vars(errors).items() if isinstance(value, type)]


def __getattr__(name: str) -> Any:
    """Import torch, and all of this package, with the first name that is used: the command needs
    none.
    """
    for module, names in _MODULES.items():
        if name in names:
            importlib.import_module(f"{__name__}.wrapper")  # notes threads and sources as they are
            found = vars(importlib.import_module(f"{__name__}.{module}"))
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
