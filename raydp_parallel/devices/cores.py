"""How many cores there are, and how the driver leaves them to replicas.

The driver's threads rest while replicas compute on the same cores.

A thread of OpenMP's that has done its part of an operation looks for the next one for a while
before it sleeps; GCC's did so for 8 ms, on a core of its own. Of a training step of 23 ms on two
cores, the driver's second thread looked for 17, and two replicas waited for that core. So where
replicas are on the driver's node, a thread that calls them sends its helpers away first, which
takes 20 us; its next operation that needs them starts others, in 30 us. Nothing else of the process
is changed: what it computes between calls is as fast as without replicas.
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
"""By these the user says how threads wait."""


def cores(mounted: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """How many cores this process may use: by its affinity, and by the quotas of its control
    groups, 1 and 2.

    Args:
        mounted: Where control groups are seen.
        own: Says which groups the process is in.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
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
        # In a container the path may be the host's, of which only the root is seen here.
        group = PurePosixPath(path.lstrip("/"))
        for name in ("", kinds, "cpu") if kinds else ("", "unified"):
            for folder in (group, *group.parents):
                yield from _quota(mounted / name / folder)


def _quota(folder: Path) -> Iterator[float]:
    """What one group allows, if it limits anything."""
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
    """End the threads that help this one compute, until it needs them again; where that can be had.

    Inside of a parallel region nothing happens, and helpers of other threads are theirs.
    """
    _pause()


def _nothing() -> None:
    """Where torch computes with another library than GCC's, or the user has said how
    threads wait.
    """


def _find_pause() -> Callable[[], object]:
    library = _openmp() if not any(name in os.environ for name in _CHOSEN) else None
    if library is None or not hasattr(library, "omp_pause_resource"):
        return _nothing
    return functools.partial(library.omp_pause_resource, _SOFT, library.omp_get_initial_device())


def _openmp() -> ctypes.CDLL | None:
    """The library that torch's operations run in parallel by, if it is GCC's."""
    try:
        # and with it what that one uses
        library = ctypes.CDLL(str(_TORCH), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        return None
    other = hasattr(library, "kmp_set_blocktime")  # Intel's, which goes by GCC's names, too
    return library if hasattr(library, "GOMP_parallel") and not other else None


_pause = _find_pause()
