"""The errors of this package, and how it warns and logs. Each error says where it happened, what
was seen and what to do next, and each can be pickled.

Errors of the user's own module are not here: they come back as the type they were raised as (see
``replica/exceptions.py``).
"""

from __future__ import annotations

import logging
import os
import sys
import types
import warnings

log = logging.getLogger("raydp_parallel")


class ParallelError(RuntimeError):
    """The base class of every error of this package."""


class PlacementError(ParallelError):
    """The cluster does not have the devices that were asked for, or not in time."""


class NoRoom(PlacementError):
    """Nothing was free for a replica within the deadline. The text says what is free, and where."""


class ClusterError(ParallelError):
    """Ray cannot be used as it is: a client connection, or a cluster that went away."""


class ForkedProcess(ClusterError):
    """This process was forked from the one that the replicas belong to, and cannot call them."""


class ExecutorClosed(ParallelError):
    """The executor was closed before this call."""


class ReplicaError(ParallelError):
    """Something happened to one replica that is not an ordinary exception of the user's module."""


class ReplicaExit(ReplicaError):
    """The module asked its process to end (``SystemExit``, ``KeyboardInterrupt``). The replica
    stays alive.
    """


class ReplicaDied(ReplicaError):
    """The replica's process ended, or was too slow, and its work could not be done again."""


class GraphLost(ReplicaError):
    """Backward needs a graph that went away with the replica that held it."""


class StateChanged(GraphLost):
    """The graph cannot be made again, because the module or its arguments have changed since the
    forward.
    """


class StateLost(ReplicaError):
    """The last replica that had made the latest steps of a `DataParallel.optimizer` is gone, and
    the weights are as of the last sync; or a step could not be made.
    """


class TransferError(ParallelError, TypeError):
    """A value cannot be sent to another process; the message names the path to it."""


class SourceMismatch(ParallelError):
    """A replica has other source than the driver under a module's name."""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the program's line: that of the first frame that is neither torch's nor ours."""
    level = 1
    frame: types.FrameType | None = sys._getframe()
    while frame and frame.f_globals["__name__"].partition(".")[0] in ("raydp_parallel", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def forked() -> ForkedProcess:
    """Make the error for a process that uses the replicas of the process it was forked from."""
    return ForkedProcess(
        f"this process ({os.getpid()}) was forked from the one that the replicas belong to, and "
        "cannot call them. Call the model in the parent; or start this process by spawn "
        "(multiprocessing.get_context('spawn')), and make the model in it"
    )
