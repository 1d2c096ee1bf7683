"""Devices, CPU and CUDA alike. Nobody else in the package asks whether a tensor is on CUDA."""

from __future__ import annotations

from raydp_parallel.devices.about import (
    MemoryLook,
    check_balance,
    describe,
    give_back_freed,
    output_place,
    own,
    take_given,
)
from raydp_parallel.devices.contents import Prints, compare, compare_runs, copied, lies_on_a_gpu, prints
from raydp_parallel.devices.cores import rest
from raydp_parallel.devices.gpu import Stopwatch, finish, let_go, on_host, pinner, spoiled
from raydp_parallel.devices.ipc import (
    DeviceArena,
    DeviceLink,
    DeviceSlice,
    Opener,
    by_host,
    clear_after,
    expandable,
    gpu_in_use,
    reaching,
    refused,
    sample,
    shows,
)
from raydp_parallel.devices.kinds import is_cpu
from raydp_parallel.devices.lanes import Lane, Makers
from raydp_parallel.devices.memory import (
    RECYCLED,
    in_place,
    load,
    load_all,
    near,
    piece,
    reader,
    recycled,
    scratch,
    upload,
    windows,
)
from raydp_parallel.devices.raw import view
from raydp_parallel.devices.settings import keep_freed_memory, seed, start_thread, use_threads
from raydp_parallel.devices.streams import Courier, Track, courier, follow, hand_over, track

__all__ = [
    "RECYCLED",
    "Courier",
    "DeviceArena",
    "DeviceLink",
    "DeviceSlice",
    "Lane",
    "Makers",
    "MemoryLook",
    "Opener",
    "Prints",
    "Stopwatch",
    "Track",
    "by_host",
    "check_balance",
    "clear_after",
    "compare",
    "compare_runs",
    "copied",
    "courier",
    "describe",
    "expandable",
    "finish",
    "follow",
    "give_back_freed",
    "gpu_in_use",
    "hand_over",
    "in_place",
    "is_cpu",
    "keep_freed_memory",
    "let_go",
    "lies_on_a_gpu",
    "load",
    "load_all",
    "near",
    "on_host",
    "output_place",
    "own",
    "piece",
    "pinner",
    "prints",
    "reaching",
    "reader",
    "recycled",
    "refused",
    "rest",
    "sample",
    "scratch",
    "seed",
    "shows",
    "spoiled",
    "start_thread",
    "take_given",
    "track",
    "upload",
    "use_threads",
    "view",
    "windows",
]
