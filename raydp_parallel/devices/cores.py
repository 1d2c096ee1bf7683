"""The driver's threads rest while replicas compute on the same cores.

A thread of OpenMP's that has done its part of an operation looks for the next one for a while before it sleeps; GCC's
did so for 8 ms, on a core of its own. Of a training step of 23 ms on two cores, the driver's second thread looked for
17, and two replicas waited for that core; without it the step took 15 to 18. GCC's library gives up at once when
its process has more threads than there are cores, whether they do anything or not. So a sleeping thread here has once
asked for as many as there are cores.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from pathlib import Path

import torch

_TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"

_owners: weakref.WeakSet[object] = weakref.WeakSet()


def rest_while(owner: object) -> None:
    """Let threads that wait for work sleep at once, as long as ``owner`` lives; where that can be had."""
    library = _openmp()
    if library is not None and owner not in _owners:
        _owners.add(owner)
        over = threading.Event()
        weakref.finalize(owner, over.set)
        threading.Thread(target=_hold, args=(library, over), name="raydp-rest", daemon=True).start()


def _openmp() -> ctypes.CDLL | None:
    """The library that torch's operations run in parallel by, if it is GCC's."""
    try:
        library = ctypes.CDLL(str(_TORCH), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)  # and with it what that one uses
    except (OSError, AttributeError):
        return None
    other = hasattr(library, "kmp_set_blocktime")  # Intel's, which goes by GCC's names, too
    return library if hasattr(library, "GOMP_parallel") and not other else None


def _hold(library: ctypes.CDLL, over: threading.Event) -> None:
    nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
    library.GOMP_parallel(nothing, None, len(os.sched_getaffinity(0)), 0)  # its threads are this one's until it ends
    over.wait()
