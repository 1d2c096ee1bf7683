"""A GPU that is none: tensors lie on the CPU, what CUDA would do later is done later, and
everything is written down.

A copy to the host that does not block takes place when an event behind it is waited for, with
the bytes that there were when it was asked for. So a read without a wait finds what was there
before, as on a GPU. Each stream does what it was asked for in order, and what another stream was
asked for only where it was told to wait for that. A copy from the host arrives at once, for the
operations that come next are the CPU's; but its source has to be there, unchanged, when the stream
comes to it, and memory that an arena got back is overwritten.

Kernels run at once, unless a test has them `queued`: then those that only write to memory that is
there run when their stream comes to them, the others once their stream has done what it was asked
for, and what `torch.empty` makes holds nothing of use. A thread has current streams of its own, and
may stand for another process, with a GPU of its own (`FakeGpu.process`).

It refuses what a GPU refuses: everything once a kernel failed an assertion, the next kernel after a
call with an error that was not taken, handles of a process that ended, arguments of other types
than torch's, two threads in one pool of memory.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from raydp_parallel.devices import cuda as package
from raydp_parallel.devices import ranges
from raydp_parallel.devices.buffers import Arena

ASSERTION = "CUDA error: device-side assert triggered"

POISON = 0xDD
"""What memory holds that was given back, or that nothing was written to."""

NOT_YET = object()
"""What work gives that cannot be done yet, as it waits for another process."""

UUID = "GPU-12345678"


_copy: Any = torch._C.TensorBase.copy_
_empty: Any = torch.empty
_ones: Any = torch.ones
_to: Any = torch._C.TensorBase.to
_device: Any = torch._C.TensorBase.device
_foreach_copy: Any = torch._foreach_copy_
_give_back: Any = Arena._give_back


class Stream:
    """What was asked of the device in order.

    Args:
        gpu: The device.
        name: How the log calls it; empty for the default stream.
        index: Of which device it is.
    """

    def __init__(self, gpu: FakeGpu, name: str = "", index: int = 0) -> None:
        self.gpu = gpu
        self.name = name
        self.index = index
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.asked = 0

    def later(self, work: Callable[[], object]) -> None:
        """Put some work on it."""
        self.queue.append(work)
        self.asked += 1

    def go_to(self, number: int) -> object:
        """Do what was asked up to a moment, as far as nothing waits for another process; whether
        that was all: None if so, else `NOT_YET`.
        """
        while self.done < number:
            work = self.queue.pop(0)
            with _disable_current_modes():
                found = work()
            if found is NOT_YET:
                self.queue.insert(0, work)
                return NOT_YET
            self.done += 1
        return None

    def run_to(self, number: int) -> None:
        """Do what was asked up to a moment, and wait for other processes."""
        while self.go_to(number) is NOT_YET:
            time.sleep(0.0005)

    def drop(self) -> None:
        """What is still to do is never done: the process that asked for it has ended."""
        self.queue[:] = [lambda: None] * len(self.queue)

    def wait_stream(self, other: Stream) -> None:
        """Go on behind what another one was asked for."""
        self.gpu.waits(self, other, other.asked)


class _Inside:
    """A block in which a device is the current one. It may be entered more than once."""

    def __init__(self, stack: list[int], index: int) -> None:
        self._stack = stack
        self._index = index

    def __enter__(self) -> None:
        self._stack.append(self._index)

    def __exit__(self, *_: object) -> None:
        self._stack.pop()


class FakeGpu:
    """The device, and what was asked of it.

    Attributes:
        log: What was asked, in order.
        pinned: Addresses of registered memory, with its sizes.
        refuses: Whether memory cannot be registered.
        asked_to_pin: How often memory was to be registered.
        registering: The devices by which memory was registered, or ceased to be.
        counts: Whether the allocator says how much memory there is.
        last_error: An error that was not taken, which the next kernel tells.
        broken: What everything is refused with, once a kernel failed an assertion.
        torn: Copies from the host with a source that was not there any more when they took place.
        shares: What was shared between processes, by handle.
        readers: How many processes torch counts that may still read it, by the counter's place.
        gone: Whether the process that shared it has ended.
        expandable: Whether the allocator makes segments that grow.
        used: The devices on which something of this process lies.
        current: The current streams of each device, last, and those that were it around.
        recorded: Tensors that were said to be in use on a stream, by name.
        pools: How many pools of memory were made, and which is in use.
        brought: Bytes of the device's that hold what copies from the host brought there, and the
            most that there were.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: dict[int, int] = {}
        self.refuses = False
        self.asked_to_pin = 0
        self.registering: list[int] = []
        self.counts = True
        self.last_error = ""
        self.broken = ""
        self.torn: list[str] = []
        self.gone = False
        self.expandable = False
        self.used: set[int | None] = {None, 0}
        self.shares: dict[bytes, Any] = {}
        self.readers: dict[int, int] = {}
        self.events: dict[bytes, Any] = {}
        self.opened: list[bytes] = []
        self._streams = itertools.count(1)
        self._first: dict[int, Stream] = {}
        self._thread = threading.local()
        self._elsewhere: dict[int, int] = {}
        self._recording: int | None = None
        self.recorded: list[str] = []
        self.pools: list[Any] = []
        self.brought = [0, 0]

    # what a thread has of its own, and a process

    @property
    def _inside(self) -> list[int]:
        """The current devices of this thread, last, and those that were it around."""
        found: list[int] = vars(self._thread).setdefault("inside", [0])
        return found

    @property
    def _stacks(self) -> dict[int, list[Stream]]:
        """The current streams of this thread, by device."""
        found: dict[int, list[Stream]] = vars(self._thread).setdefault("stacks", {})
        return found

    @property
    def _defaults(self) -> dict[int, Stream]:
        """The default streams of this thread's process, by device."""
        found: dict[int, Stream] = vars(self._thread).setdefault("defaults", self._first)
        return found

    @contextmanager
    def process(self, of: dict[int, Stream] | None = None) -> Iterator[None]:
        """Let this thread stand for another process, a new one by default."""
        before = self._defaults
        self._thread.defaults = {} if of is None else of
        try:
            yield
        finally:
            self._thread.defaults = before

    # what is refused

    def check(self) -> None:
        """Every call of CUDA's, once a kernel failed."""
        if self.broken:
            raise RuntimeError(self.broken)

    def launch(self) -> None:
        """Every kernel: it tells what no earlier call was asked about."""
        self.check()
        if self.last_error:
            error, self.last_error = self.last_error, ""
            raise RuntimeError(error)

    def fail_later(self, text: str = ASSERTION) -> None:
        """A kernel that fails an assertion when the current stream comes to it."""
        self.current_stream().later(lambda: setattr(self, "broken", text))

    # copies

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``Tensor.copy_``."""
        self.check()
        if not non_blocking:
            return _copy(target, source)
        then = source.clone()
        self.later("copy to the host", lambda: _copy(target, then), source.device)
        return target

    def foreach_copy(
        self, targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False
    ) -> None:
        """``torch._foreach_copy_``."""
        first = targets[0]
        if non_blocking and (self.is_pinned(first) or not first.untyped_storage().resizable()):
            self.check()
            then = [source.clone() for source in sources]
            device = sources[0].device
            self.later("copy to the host", lambda: _foreach_copy(targets, then), device)
            return
        self.launch()
        for target, source in zip(targets, sources, strict=True):
            self.read_later(source, target.device)
        _foreach_copy(targets, sources, non_blocking)

    def to(self, source: Tensor, *args: Any, **more: Any) -> Tensor:
        """``Tensor.to``."""
        if more.get("non_blocking"):
            self.launch()
            self.read_later(source, args[0])
        found = _to(source, *args, **more)
        crosses = found is source and not source.untyped_storage().resizable()
        if crosses and isinstance(args[0], torch.device):
            found = source.clone()
        if more.get("non_blocking") and not source.untyped_storage().resizable():
            self.hold(found.nbytes)
            weakref.finalize(found, self.hold, -found.nbytes)
        return found

    def hold(self, size: int) -> None:
        """Count bytes that were brought, or are free again."""
        now = self.brought[0] + size
        self.brought = [now, max(now, self.brought[1])]

    def read_later(self, source: Tensor, device: torch.device) -> None:
        """A copy from the host, if the source lies there: it must be the same when the stream comes
        to it.
        """
        if source.untyped_storage().resizable():  # torch's own, which stands for the device's
            return
        alive, then = weakref.ref(source), source.clone()

        def read() -> None:
            now = alive()
            if now is None or not torch.equal(now, then):
                self.torn.append(
                    f"{then.nbytes} bytes of the host's were "
                    f"{'freed' if now is None else 'changed'}"
                )

        self.current_stream(device).later(read)

    def ones(self, *args: Any, **more: Any) -> Tensor:
        """``torch.ones``: a kernel."""
        self.launch()
        return _ones(*args, **more)

    # two devices

    def properties(self, device: Any) -> Any:
        """``torch.cuda.get_device_properties``."""
        index = getattr(device, "index", device) or 0
        uuid = UUID if not index else f"{UUID}-{index}"
        return SimpleNamespace(name="Fake", uuid=uuid, total_memory=1000, multi_processor_count=10)

    def put(self, tensor: Tensor, index: int) -> Tensor:
        """Let a tensor, and what looks at its memory, lie on another device."""
        self._elsewhere[tensor.untyped_storage().data_ptr()] = index
        return tensor

    def device_of(self, tensor: Tensor) -> torch.device:
        """``Tensor.device``."""
        found: torch.device = _device.__get__(tensor)
        if not self._elsewhere or tensor.layout is not torch.strided or found.type != "cpu":
            return found
        index = self._elsewhere.get(tensor.untyped_storage().data_ptr())
        return found if index is None else torch.device("cpu", index)

    def default_stream(self, device: torch.device | None = None) -> Stream:
        """A device's default stream."""
        index = (device.index or 0) if device is not None else 0
        if index not in self._defaults:
            self._defaults[index] = Stream(self, f"device {index}" if index else "", index)
        return self._defaults[index]

    @property
    def default(self) -> Stream:
        """The first device's."""
        return self.default_stream()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        """A device's current stream."""
        stack = self._stacks.get((device.index or 0) if device is not None else 0)
        return stack[-1] if stack else self.default_stream(device)

    def is_pinned(self, tensor: Tensor) -> bool:
        """``Tensor.is_pinned``."""
        return any(at <= tensor.data_ptr() < at + size for at, size in self.pinned.items())

    def record_stream(self, _tensor: Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self.recorded.append(stream.name)

    def empty(self, *shape: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        """``torch.empty``."""
        found = _empty(*shape, **more)
        where = more.get("device")
        if isinstance(where, torch.device) and where.index:
            self.put(found, where.index)
        if pin_memory:
            self.pinned[found.data_ptr()] = found.nbytes
            weakref.finalize(found, self.pinned.pop, found.data_ptr(), None)
            self.log.append("pinned buffer")
            found.fill_(77)
        return found

    def later(
        self, what: str, work: Callable[[], object], device: torch.device | None = None
    ) -> None:
        """Put some work on the stream."""
        stream = self.current_stream(device)
        self.say(what, stream)
        stream.later(work)

    def say(self, what: str, stream: Stream) -> None:
        """Write down what was asked of a stream."""
        self.log.append(f"{what} on {stream.name}" if stream.name else what)

    # streams and pools of memory

    def stream(self, device: torch.device | None = None) -> Stream:
        """Another stream."""
        return Stream(
            self, f"stream {next(self._streams)}", (device.index or 0) if device is not None else 0
        )

    def waits(self, stream: Stream, other: Stream, at: int) -> None:
        """A stream goes on when another one has come so far."""
        self.say("stream waits", stream)
        stream.later(lambda: other.run_to(at))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        stack = self._stacks.setdefault(stream.index, [])
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    @contextmanager
    def allocating(self, pool: Any, _device: torch.device) -> Iterator[None]:
        """``torch.cuda.use_mem_pool``."""
        if self._recording is not None:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._recording = threading.get_ident()
        try:
            self.pools.append(pool)
            yield
        finally:
            self._recording = None

    # cudaHostRegister and its counterpart

    def cudart(self) -> Any:
        """The runtime."""

        def register(address: int, size: int, _flags: int) -> int:
            self.asked_to_pin += 1
            self.registering.append(self._inside[-1])
            if not self.refuses:
                self.pinned[address] = size
                return 0
            self.last_error = "CUDA error: operation not supported"
            return 801

        def unregister(address: int) -> int:
            self.registering.append(self._inside[-1])
            del self.pinned[address]
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    def inside(self, device: torch.device) -> _Inside:
        """``torch.cuda.device``."""
        return _Inside(self._inside, device.index or 0)

    def allocated(self, device: Any) -> int:
        """``torch.cuda.memory_allocated``."""
        if not self.counts:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
        return 5 if getattr(device, "index", device) in self.used else 0

    def event_class(self) -> type:
        """Events of this device."""
        gpu = self
        numbers = itertools.count(1)

        class Event:
            def __init__(self, enable_timing: bool = False, interprocess: bool = False) -> None:
                self.timed, self.shared, self.at, self.when = enable_timing, interprocess, 0, 0.0
                self.stream = gpu.default

            def record(self, stream: Stream) -> None:
                gpu.check()
                assert stream is gpu.current_stream(torch.device("cpu", stream.index))
                gpu.say("record", stream)
                self.stream, self.at, self.when = stream, stream.asked, time.perf_counter()

            def synchronize(self) -> None:
                gpu.check()
                gpu.say("wait", self.stream)
                self.stream.run_to(self.at)
                gpu.check()

            def query(self) -> bool:
                gpu.check()
                return self.stream.done >= self.at

            def wait(self, stream: Stream) -> None:
                gpu.check()
                gpu.waits(stream, self.stream, self.at)

            def elapsed_time(self, end: Any) -> float:
                assert self.timed
                assert end.timed
                if not (self.query() and end.query()):
                    raise RuntimeError(
                        "Both events must be completed before calculating elapsed time."
                    )
                return 1e3 * (end.when - self.when)

            def ipc_handle(self) -> bytes:
                assert self.shared
                handle = b"event %d" % next(numbers)
                gpu.events[handle] = self
                return handle

            @staticmethod
            def from_ipc_handle(device: torch.device, handle: bytes) -> Any:
                assert isinstance(device, torch.device)
                return gpu.events[handle]

        return Event

    def share(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """``reductions.reduce_tensor``."""
        self.check()
        number, storage = len(self.shares), tensor.untyped_storage()
        handle = b"storage %d" % number
        self.shares[handle], self.readers[number] = storage, 1
        shape = tensor.size(), tensor.stride(), tensor.storage_offset()
        kind = type(tensor), *shape, torch.TypedStorage, tensor.dtype, 5
        how = handle, storage.nbytes(), 0, False, b"counter", number, b"event", False
        return reductions.rebuild_cuda_tensor, (*kind, *how)

    def open(self, *given: Any) -> Tensor:
        """``reductions.rebuild_cuda_tensor``."""
        self.check()
        kinds = [type(Tensor), torch.Size, tuple, int, type, torch.dtype, int]
        if [*map(type, given)] != [*kinds, bytes, int, int, bool, bytes, int, bytes, bool]:
            raise TypeError(f"Invalid arguments to rebuild_cuda_tensor: {given}")
        handle = given[7]
        if self.gone:
            raise RuntimeError("CUDA error: invalid resource handle")
        if handle in self.opened:  # which torch would not have counted
            raise RuntimeError("a handle was opened twice")
        self.opened.append(handle)
        found: Tensor = _empty(0, dtype=given[5])
        return found.set_(self.shares[handle], given[3], given[1], given[2])

    def count_down(self, file: bytes, place: int, *, device: str) -> None:
        """``UntypedStorage._release_ipc_counter``."""
        assert (type(file), device) == (bytes, "cuda")
        self.readers[place] -= 1

    def refuse_to_move(self, storage: Any) -> Any:
        """``_share_fd_cpu_``."""
        if ranges.is_cpu(torch.device("cpu")):
            return _share_fd(storage)
        raise RuntimeError("_share_fd_: only available on CPU")

    def is_shared(self, storage: Any) -> bool:
        """``UntypedStorage.is_shared``: of a device's memory torch says so always."""
        return _is_shared(storage) if ranges.is_cpu(torch.device("cpu")) else True


_share_fd: Any = torch.UntypedStorage._share_fd_cpu_
_is_shared: Any = torch.UntypedStorage.is_shared


def _overwrite(arena: Arena, segment: Any) -> None:
    """``Arena._give_back``."""
    if hasattr(segment, "array"):
        segment.array[:] = POISON
    _give_back(arena, segment)


@contextmanager
def installed(
    patch: pytest.MonkeyPatch, kind: Callable[[], FakeGpu] = FakeGpu
) -> Iterator[FakeGpu]:
    """Let the package take the CPU for a GPU, of a kind."""
    gpu = kind()
    patch.setattr(ranges, "HOST", frozenset())
    for name, value in {
        "Event": gpu.event_class(),
        "current_stream": gpu.current_stream,
        "default_stream": gpu.default_stream,
        "Stream": gpu.stream,
        "stream": gpu.on,
        "MemPool": lambda **_: object(),
        "empty_cache": lambda: None,
        "use_mem_pool": gpu.allocating,
        "device": gpu.inside,
        "cudart": gpu.cudart,
        "default_generators": [torch.Generator()],
        "memory_allocated": gpu.allocated,
        "max_memory_allocated": lambda _device: 7,
        "memory_snapshot": lambda: [{"is_expandable": gpu.expandable}],
        "get_device_properties": lambda index: gpu.properties(index),
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(reductions, "reduce_tensor", gpu.share)
    patch.setattr(reductions, "rebuild_cuda_tensor", gpu.open)
    patch.setattr(
        torch.UntypedStorage, "_share_fd_cpu_", lambda storage: gpu.refuse_to_move(storage)
    )
    patch.setattr(torch.UntypedStorage, "is_shared", lambda storage: gpu.is_shared(storage))
    patch.setattr(torch.UntypedStorage, "_release_ipc_counter", gpu.count_down)
    patch.setattr(torch, "empty", gpu.empty)
    patch.setattr(torch, "ones", gpu.ones)
    patch.setattr(torch, "_foreach_copy_", gpu.foreach_copy)
    patch.setattr(Arena, "_give_back", _overwrite)
    methods: dict[str, Callable[..., Any]] = {
        "copy_": gpu.copy,
        "is_pinned": gpu.is_pinned,
        "record_stream": gpu.record_stream,
        "to": gpu.to,
    }
    for name, method in methods.items():
        type.__setattr__(Tensor, name, _bound(method))
    type.__setattr__(Tensor, "device", property(gpu.device_of))
    try:
        yield gpu
    finally:
        for name in (*methods, "device"):
            type.__delattr__(Tensor, name)
        package.lent.kept.clear()
    assert not gpu.torn, gpu.torn


_KERNELS = frozenset(("copy_", "add_", "add", "mul_", "zero_", "fill_"))
"""Operations that write to memory which is there before, where they are asked to."""


class _Kernels(TorchDispatchMode):
    """Kernels of one thread: those that only write to memory that is there run when their stream
    comes to them. What makes memory, and what the host reads, is done behind all that the current
    stream was asked for.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        more, schema = kwargs or {}, func._schema
        stream, name = self._gpu.current_stream(), schema.name.partition("::")[2]
        if name in _KERNELS and schema.is_mutable:
            self._gpu.launch()

            def kernel() -> None:
                func(*args, **more)

            stream.later(kernel)
            return more.get("out", args[0])
        if not func.is_view:  # which the host makes alone
            stream.run_to(stream.asked)
        found = func(*args, **more)
        if "empty" in name:
            found.untyped_storage().fill_(POISON)
        return found


@contextmanager
def queued(patch: pytest.MonkeyPatch, gpu: FakeGpu) -> Iterator[None]:
    """Let kernels run when their stream comes to them: those of this thread, and of threads that
    start in the block, which belong to the process of the thread that starts them.
    """
    start: Any = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        run, process = thread.run, gpu._defaults

        def under() -> None:
            with gpu.process(process), _Kernels(gpu):
                run()

        thread.run = under  # type: ignore[method-assign]
        start(thread)

    with patch.context() as patched, _Kernels(gpu):
        patched.setattr(threading.Thread, "start", started)
        yield


def _bound(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: method(tensor, *args, **kwargs)
