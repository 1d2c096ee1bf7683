"""Cores and threads of this process.

An OpenMP thread that has finished its part of an operation spins before it sleeps; GCC's were
measured to spin for 8 ms, each on a core that replicas wait for. So a thread that is about to wait
ends its helpers first (20 us); its next parallel operation starts new ones (30 us).
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
"""Variables by which the user chooses how threads wait."""

MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "68719476736",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_ARENA_MAX": "1",
}
"""Lets glibc keep freed memory, in one heap: new pages cost a replica a fifth of a step. Read as a
process starts.
"""


def cores(mounted: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Count the cores that this process may use, by affinity and by quotas of control groups."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas(mounted, own)])))


def _quotas(mounted: Path, own: Path) -> Iterator[float]:
    """Yield the cores that each group allows, from the process's own up to the root."""
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
    """Yield the cores that one group allows, if it has a limit."""
    try:
        if (folder / "cpu.max").exists():  # version 2
            limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
        if limit not in ("max", "-1"):
            yield int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return


def _find_pause() -> Callable[[], object]:
    """Find OpenMP's function for it, if torch uses GCC's library and the user chose nothing."""
    try:
        # Symbols of the libraries that torch links to are found by this handle, too.
        library = ctypes.CDLL(str(_TORCH), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):
        return lambda: None
    others = hasattr(library, "kmp_set_blocktime")  # Intel's, which has GCC's names, too
    known = hasattr(library, "GOMP_parallel") and hasattr(library, "omp_pause_resource")
    if others or not known or any(name in os.environ for name in _CHOSEN):
        return lambda: None
    return functools.partial(library.omp_pause_resource, _SOFT, library.omp_get_initial_device())


AT_START = torch.get_num_threads()  # when this package was imported

rest = _find_pause()
"""Ends this thread's helpers until it needs them again. Those of other threads are not affected."""


def use(device: torch.device, count: int | None) -> None:
    """Compute with so many threads on a CPU from now on; None changes nothing."""
    if count is not None and device.type == "cpu" and torch.get_num_threads() != count:
        torch.set_num_threads(count)
