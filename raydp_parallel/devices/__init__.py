"""Devices, CPU and CUDA alike. No other package asks whether a tensor is on CUDA."""

from __future__ import annotations

from raydp_parallel.devices.comparison import (
    Prints,
    compare,
    compare_runs,
    copied,
    prints,
    prints_of_host,
)
from raydp_parallel.devices.cores import rest
from raydp_parallel.devices.cuda import Stopwatch, finish, let_go, on_host, pinner, spoiled
from raydp_parallel.devices.info import (
    MemoryLook,
    check_balance,
    describe,
    give_back_freed,
    output_place,
    own,
    take_given,
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
    row_copied,
    row_in_place,
    row_windows,
    scratch,
    upload,
    windows,
)
from raydp_parallel.devices.process import (
    keep_freed_memory,
    random_kept,
    reseed,
    seed,
    start_thread,
    use_threads,
)
from raydp_parallel.devices.raw import view
from raydp_parallel.devices.streams import (
    Courier,
    Track,
    courier,
    follow,
    hand_over,
    same_stream,
    track,
)

__all__ = [
    "RECYCLED",
    "Courier",
    "Lane",
    "Makers",
    "MemoryLook",
    "Prints",
    "Stopwatch",
    "Track",
    "check_balance",
    "compare",
    "compare_runs",
    "copied",
    "courier",
    "describe",
    "finish",
    "follow",
    "give_back_freed",
    "hand_over",
    "in_place",
    "is_cpu",
    "keep_freed_memory",
    "let_go",
    "load",
    "load_all",
    "near",
    "on_host",
    "output_place",
    "own",
    "piece",
    "pinner",
    "prints",
    "prints_of_host",
    "random_kept",
    "reader",
    "recycled",
    "reseed",
    "rest",
    "row_copied",
    "row_in_place",
    "row_windows",
    "same_stream",
    "scratch",
    "seed",
    "spoiled",
    "start_thread",
    "take_given",
    "track",
    "upload",
    "use_threads",
    "view",
    "windows",
]
