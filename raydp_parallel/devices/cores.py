"""The number of cores, and how driver and replicas on one machine leave them to each other.

An OpenMP thread that has finished its part of an operation spins before it sleeps, in case another
operation begins; GCC's threads were measured to spin for 8 ms, each on a core. In a training step
of 23 ms on two cores, the driver's second thread spun for 17 ms, and two replicas waited for that
core. So if replicas are on the driver's node, a thread that calls them first ends its helper
threads, which takes 20 us; its next parallel operation starts new ones, which takes 30 us. A
replica does the same before it answers: with one replica on two cores the driver's loss took 2.6 ms
instead of 0.2, because its helper waited for the core on which the replica's spun. Nothing else
changes: the driver's own operations between calls are as fast as without replicas.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import torch

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"

_SOFT = 1
_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables of the environment by which the user chooses how threads wait."""


def cores(mounted: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """The number of cores that this process may use: by its affinity, and by the quotas of its
    control groups, version 1 and 2.

    Args:
        mounted: The folder of control groups.
        own: The file that lists the groups of the process.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, int(min([allowed, *_quotas(mounted, own)])))


def _quotas(mounted: Path, own: Path) -> Iterator[float]:
    """The cores that each group allows, from the process's own up to the root."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        # In a container the path may be the host's, and only its root is visible here.
        group = PurePosixPath(path.lstrip("/"))
        for name in ("", kinds, "cpu") if kinds else ("", "unified"):
            for folder in (group, *group.parents):
                yield from _quota(mounted / name / folder)


def _quota(folder: Path) -> Iterator[float]:
    """The cores that one group allows, if it has a limit."""
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        if limit not in ("max", "-1"):
            yield int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return


def rest() -> None:
    """End the helper threads of this thread until it needs them again, where that is possible.

    Inside a parallel region nothing happens. Helpers of other threads are not affected.
    """
    _pause()


def _nothing() -> None:
    """Do nothing: torch uses another library than GCC's, or the user has chosen how threads
    wait.
    """


def _find_pause() -> Callable[[], object]:
    library = _openmp() if not any(name in os.environ for name in _CHOSEN) else None
    if library is None or not hasattr(library, "omp_pause_resource"):
        return _nothing
    return functools.partial(library.omp_pause_resource, _SOFT, library.omp_get_initial_device())


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch uses, if it is GCC's."""
    try:
        # Symbols of the libraries that torch links to are found by this handle too.
        library = ctypes.CDLL(str(_TORCH), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        return None
    other = hasattr(library, "kmp_set_blocktime")  # Intel's, which has GCC's names too
    return library if hasattr(library, "GOMP_parallel") and not other else None


_pause = _find_pause()
