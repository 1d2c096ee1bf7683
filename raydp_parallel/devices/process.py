"""This process and its device: what it is, its cores and threads, its seeds, the memory that it
keeps, numbers that name its things, notes of those that were freed, and its waiting threads.

[Note: freed memory]
glibc gives threads heaps of their own. Such a heap ends at 64 MB and is returned when it is empty;
larger blocks come from the kernel, which clears them each time: writing a tensor of 67 MB took
35 ms, and 3 to 8 ms where memory is kept. The main heap of the process has no such limit. A thread
cannot choose its heap, only find out which one it has. With another allocator than glibc's none of
this holds, and nothing is done.

[Note: cores]
An OpenMP thread that has finished its part of an operation spins before it sleeps, in case another
operation begins; GCC's threads were measured to spin for 8 ms, each on a core. In a training step
of 23 ms on two cores, the driver's second thread spun for 17 ms, and two replicas waited for that
core. So if replicas are on the driver's node, a thread that calls them first ends its helper
threads, which takes 20 us; its next parallel operation starts new ones, which takes 30 us. A
replica does the same before it answers: with one replica on two cores the driver's loss took 2.6 ms
instead of 0.2, because its helper waited for the core on which the replica's spun. Nothing else
changes: the driver's own operations between calls are as fast as without replicas.

[Note: freed objects]
A ``__del__``, or a callback in Python, runs at any moment, and Ctrl-C may come in it. Python
ignores what is raised there: the user's Ctrl-C is lost, and what was to be done is not done. So
objects that live as long as a call have no such finalizer. The interpreter itself puts their notes
aside, and a later call takes them (`Freed`).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import os
import queue
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

import numpy as np
import torch

from raydp_parallel.devices.ranges import ReplicaHello, is_cpu

_counters: collections.defaultdict[str, itertools.count[int]] = collections.defaultdict(
    functools.partial(itertools.count, 1)
)
"""The next number of each kind. Threads need no lock: each step is one of C's."""


def number(kind: str) -> int:
    """The next number for a kind of thing, from 1."""
    return next(_counters[kind])


T = TypeVar("T")


class Watch(weakref.ref[object], Generic[T]):
    """A reference to an object, with a note about it."""

    __slots__ = ("note",)
    note: T


class Freed(Generic[T]):
    """The notes of objects that were freed. Threads may use it at once.

    Attributes:
        ended: What `take` has to look at: empty in most calls, which need not ask.
    """

    def __init__(self) -> None:
        self._watched: set[Watch[T]] = set()
        self.ended: collections.deque[Watch[T]] = collections.deque()

    def watch(self, thing: object, note: T) -> Watch[T]:
        """Keep a note until an object is freed and `take` is called."""
        watch: Watch[T] = Watch(thing, self.ended.append)
        watch.note = note
        self._watched.add(watch)
        return watch

    def forget(self, watch: Watch[T]) -> None:
        """Do not watch an object any more."""
        self._watched.discard(watch)

    def take(self) -> list[T]:
        """The notes of objects that were freed, each once."""
        notes: list[T] = []
        while self.ended:
            try:
                watch = self.ended.popleft()
            except IndexError:  # another thread took it
                break
            if watch in self._watched:
                self._watched.discard(watch)
                notes.append(watch.note)
        return notes


class Waiters:
    """Threads that wait for a change of some state, each on a lock of its own, also threads that
    Ctrl-C interrupts.

    `threading.Condition` takes its lock again when a wait ends. If Ctrl-C ends that, the caller's
    ``with`` gives up a lock that another thread holds by now: two threads are then in the guarded
    block at once, and the other one's ``with`` raises. Here a thread waits without the lock of the
    state.

    All methods are called with the state's lock held, which is entered by ``with`` directly. A
    thread that found nothing yet enters itself, leaves the state's lock, acquires what it got with
    a time limit, and looks again. A limit is needed: Ctrl-C may come between a change and the
    word of it.
    """

    def __init__(self) -> None:
        self._locks: list[threading.Lock] = []

    def enter(self) -> threading.Lock:
        """A lock that is free after the next change."""
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)
        return lock

    def leave(self, lock: threading.Lock) -> None:
        """Forget a lock that is no longer waited for."""
        if lock in self._locks:
            self._locks.remove(lock)

    def wake(self) -> None:
        """Something has changed: all look again."""
        locks, self._locks = self._locks, []
        for lock in locks:
            lock.release()


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


rest = _find_pause()
"""Ends the helper threads of this thread until it needs them again, where that is possible. Inside
a parallel region nothing happens. Helpers of other threads are not affected.
"""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT = 1 << 29
_TRIES = 64
_TOO_LARGE_TO_BE_CACHED = 1 << 14
_NOT_MAIN = 0x4
"""glibc's flag, in the word before a block of memory, that it is of a thread's own heap."""

_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = (1 << 63) - 1


_of_replica = False


def belong_to_replica() -> None:
    """Note that this process does a replica's work and no other."""
    global _of_replica
    _of_replica = True


def of_replica() -> bool:
    """Whether this process does a replica's work and no other; False also where replicas run in the
    driver's process.
    """
    return _of_replica


in_replica: ContextVar[bool] = ContextVar("raydp_parallel_in_replica", default=False)
"""Whether the module of a replica runs here. Other threads of the driver's process may run
replicas, or none, at the same time.
"""


def running_replica() -> bool:
    """Whether the caller is the module of a replica. A wrapper inside that module then runs in
    place.
    """
    return _of_replica or in_replica.get()


def seed(device: torch.device, call_seed: int, chunk: int) -> None:
    """Seed all random generators that a forward may use, from the call's seed and the chunk alone
    (row A10).
    """
    value = (call_seed + chunk * _GOLDEN) & _SEED_BITS
    torch.default_generator.manual_seed(value)
    if not is_cpu(device):
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def reseed(device: torch.device, value: int) -> None:
    """Seed torch's generators of a device and of the CPU."""
    torch.default_generator.manual_seed(value)
    if not is_cpu(device):
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


@contextlib.contextmanager
def random_kept(device: torch.device) -> Iterator[None]:
    """Keep the state of torch's generators of a device and of the CPU, whatever the block does to
    them.
    """
    generators = [torch.default_generator]
    if not is_cpu(device):
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def drawing_from(device: torch.device, value: int) -> Iterator[None]:
    """Let all random generators that Python code may use draw from a seed in the block, and keep
    their states.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with random_kept(device):
        reseed(device, value)
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def use_threads(device: torch.device, count: int | None) -> None:
    """On a CPU, compute with ``count`` threads from now on; None changes nothing."""
    if count is not None and torch.get_num_threads() != count and is_cpu(device):
        torch.set_num_threads(count)


def keep_freed_memory() -> None:
    """Let this process keep freed memory, up to a limit, instead of returning it to the system and
    requesting new pages.
    """
    libc = _allocator()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        libc.mallopt(_M_ARENA_MAX, 1)  # new threads share the heaps that exist


def start_thread(work: Callable[[], object], name: str) -> None:
    """Run ``work`` in a thread of the main heap, which keeps freed memory, if one is found."""
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()
    over = threading.Event()

    def begin(last: bool) -> None:
        fits = last or _in_main_heap()
        found.put(fits)
        if fits:
            work()
        else:
            over.wait()  # if this thread ended now, the next would get its heap

    for tries in range(_TRIES):
        threading.Thread(target=begin, args=(tries == _TRIES - 1,), name=name, daemon=True).start()
        if found.get():
            break
    over.set()


def _in_main_heap() -> bool:
    """Whether this thread allocates from the main heap of the process; True if that is unknown."""
    libc = _allocator()
    if libc is None:
        return True
    libc.malloc.restype = ctypes.c_void_p
    address = libc.malloc(ctypes.c_size_t(_TOO_LARGE_TO_BE_CACHED))
    word = ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value
    libc.free(ctypes.c_void_p(address))
    return not word & _NOT_MAIN


class _Found(ctypes.Structure):
    """The file that an address belongs to: glibc's `Dl_info`."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("start", ctypes.c_void_p),
    )


def _allocator() -> ctypes.CDLL | None:
    """The C library, if it is glibc and `malloc` is its own; None if another allocator was loaded
    in its place.
    """
    process = ctypes.CDLL(None)
    needed = ("gnu_get_libc_version", "dladdr", "malloc", "mallopt")
    if not all(hasattr(process, name) for name in needed):
        return None
    bases = {_base(process, name) for name in ("gnu_get_libc_version", "malloc", "mallopt")}
    return process if len(bases) == 1 and None not in bases else None


def _base(process: ctypes.CDLL, name: str) -> int | None:
    """The load address of the file that a function of this process comes from."""
    found = _Found()
    function = ctypes.cast(getattr(process, name), ctypes.c_void_p)
    known = process.dladdr(function, ctypes.byref(found))
    base: int | None = found.base
    return base if known else None


log = logging.getLogger("raydp_parallel")


def output_place(target: int | str | torch.device) -> torch.device:
    """The driver's device that a ``target_device`` or ``output_device`` names.

    An int is a CUDA index, as upstream; ``-1`` is the CPU, with upstream's warning. Device ids are
    logical here, so on a driver without CUDA every index names the CPU, where the module of such a
    driver lies.
    """
    if isinstance(target, int) and not isinstance(target, bool):
        if target == -1:
            warnings.warn(
                "Using -1 to represent CPU tensor is deprecated. Please use a "
                'device object or string instead, e.g., "cpu".',
                FutureWarning,
                stacklevel=3,
            )
            return torch.device("cpu")
        return torch.device("cuda", target) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(target)
    if device.type != "cpu" and not torch.cuda.is_available():
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:  # which torch's stubs leave out
        return torch.device("cuda", torch.cuda.current_device())  # type: ignore[unreachable]
    return device


def own(kind: str) -> str:
    """The name of this process's device of a kind, ``"cpu"`` or ``"gpu"``.

    A process that Ray started sees the GPU that it was given, and no other. A GPU that Ray only
    counts, and torch does not find, is replaced by the CPU.
    """
    return "cuda:0" if kind == "gpu" and torch.cuda.is_available() else "cpu"


_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = ("/dev/nvidiactl", "/dev/dxg")
"""Files of a machine, or a container, that can use an NVIDIA GPU; the second is that of Windows."""


def take_given(kind: str, ids: Sequence[str]) -> str:
    """Take the device that Ray gave this process, and start CUDA there; returns the device's name.

    Args:
        kind: ``"cpu"`` or ``"gpu"``.
        ids: The GPUs that Ray gave, as ``CUDA_VISIBLE_DEVICES`` calls them.

    Raises:
        RuntimeError: CUDA does not start on a machine that has a GPU. Computing on the CPU instead
            would take a hundred times as long, without any message.
    """
    _see_only(ids if kind == "gpu" else ())
    device = own(kind)
    if kind == "cpu" or (device == "cpu" and not _has_gpus()):
        return device
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        raise RuntimeError(
            f"Ray gave this replica GPU {', '.join(ids)}, and CUDA does not start there: "
            f"{error}. A GPU in compute "
            "mode EXCLUSIVE_PROCESS serves one process, and the driver's counts if it uses that GPU"
        ) from error
    return device


def _see_only(ids: Sequence[str]) -> None:
    """Let CUDA see only these GPUs, before it starts. Ray can be configured not to do so, and then
    all replicas would share the first GPU.

    A CPU replica sees no GPU: a module that uses a GPU if there is one would take another
    replica's.
    """
    wanted = ",".join(ids)
    if os.environ.get(_VISIBLE) == wanted or torch.version.hip is not None:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA started in this process before it could be told to see "
            f"GPU {wanted or 'none'} alone"
        )
    os.environ[_VISIBLE] = wanted


def _has_gpus() -> bool:
    """Whether torch ought to find a GPU on this machine."""
    if not any(map(os.path.exists, _DRIVER)):
        return False
    if torch.version.cuda is None:
        log.warning(
            "this machine has a GPU, and torch is built for CPUs alone: it computes on the CPU"
        )
    return torch.version.cuda is not None


class MemoryLook:
    """Samples how full a device is, once per second at most: a query takes 0.1 ms.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0.0 if not is_cpu(device) else float("inf")

    def now(self) -> tuple[int, int] | None:
        """Bytes that are allocated, and the most that were; None on a CPU, and within a second of
        the last sample.
        """
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + 1.0
        allocated = torch.cuda.memory_allocated(self._device)
        return allocated, torch.cuda.max_memory_allocated(self._device)


def give_back_freed(device: torch.device) -> None:
    """Return cached memory of this process to its GPU: other processes there cannot request it."""
    if not is_cpu(device):
        gc.collect()
        torch.cuda.empty_cache()


def describe(device: torch.device, pid: int, node: str) -> ReplicaHello:
    """The description that a replica on ``device`` sends when it starts."""
    if is_cpu(device):
        return ReplicaHello(
            pid=pid,
            node=node,
            device=str(device),
            gpu="",
            gpu_uuid="",
            memory=0,
            processors=0,
            cores=cores(),
        )
    found = torch.cuda.get_device_properties(device)
    return ReplicaHello(
        pid=pid,
        node=node,
        device=str(device),
        gpu=found.name,
        gpu_uuid=str(found.uuid),
        memory=found.total_memory,
        processors=found.multi_processor_count,
    )


_IMBALANCE = """
    There is an imbalance between your GPUs. You may want to exclude GPU {} which
    has less than 75% of the memory or cores of GPU {}. You can do so by setting
    the device_ids argument to DataParallel, or by setting the CUDA_VISIBLE_DEVICES
    environment variable."""


def check_balance(found: Sequence[tuple[int, ReplicaHello]]) -> None:
    """Warn as upstream does if one GPU is much smaller than another.

    Args:
        found: For each GPU replica its device id and its description.
    """
    for name in ("memory", "processors"):
        sizes = sorted((getattr(hello, name), index) for index, hello in found)
        if sizes and sizes[0][0] < 0.75 * sizes[-1][0]:
            warnings.warn(_IMBALANCE.format(sizes[0][1], sizes[-1][1]), stacklevel=2)
            return
