"""A GPU that is none: tensors lie on the CPU, what CUDA would do later is done later, and everything is written down.

A copy to the host that does not block takes place when somebody waits for an event behind it, with the bytes that there
were when it was asked for. So who does not wait reads what was there before, as on a GPU. Each stream does what it was
asked for in order, and what another stream was asked for only where it was told to wait for that.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raydp_parallel.devices import kinds

UUID = "GPU-12345678"


_copy: Any = torch._C.TensorBase.copy_
_empty: Any = torch.empty


class Stream:
    """What was asked of the device in order.

    Args:
        gpu: The device.
        name: How the log calls it; empty for the default stream.
    """

    def __init__(self, gpu: FakeGpu, name: str = "") -> None:
        self.gpu = gpu
        self.name = name
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.asked = 0

    def later(self, work: Callable[[], object]) -> None:
        """Put some work on it."""
        self.queue.append(work)
        self.asked += 1

    def run_to(self, number: int) -> None:
        """Do what was asked up to a moment."""
        while self.done < number:
            self.queue.pop(0)()
            self.done += 1

    def wait_stream(self, other: Stream) -> None:
        """Go on behind what another one was asked for."""
        self.gpu.waits(self, other, other.asked)


class FakeGpu:
    """The device, and what was asked of it.

    Attributes:
        log: What was asked, in order.
        pinned: Addresses of registered memory, with its sizes.
        refuses: Whether memory cannot be registered.
        shares: What was shared between processes, by handle.
        current: Its current stream, last, and those that were it around.
        recorded: Tensors that were said to be in use on a stream, by name.
        pools: How many pools of memory were made, and which is in use.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: dict[int, int] = {}
        self.refuses = False
        self.shares: dict[bytes, Any] = {}
        self.events: dict[bytes, Any] = {}
        self.opened: list[bytes] = []
        self.default = Stream(self)
        self._streams = itertools.count(1)
        self.current = [self.default]
        self.recorded: list[str] = []
        self.pools: list[Any] = []

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``Tensor.copy_``."""
        if not non_blocking:
            return _copy(target, source)
        then = source.clone()
        self.later("copy to the host", lambda: _copy(target, then))
        return target

    def is_pinned(self, tensor: Tensor) -> bool:
        """``Tensor.is_pinned``."""
        return any(at <= tensor.data_ptr() < at + size for at, size in self.pinned.items())

    def record_stream(self, _tensor: Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self.recorded.append(stream.name)

    def empty(self, *shape: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        """``torch.empty``."""
        found = _empty(*shape, **more)
        if pin_memory:
            self.pinned[found.data_ptr()] = found.nbytes
            self.log.append("pinned buffer")
            found.fill_(77)
        return found

    def later(self, what: str, work: Callable[[], object]) -> None:
        """Put some work on the stream."""
        self.say(what, self.current[-1])
        self.current[-1].later(work)

    def say(self, what: str, stream: Stream) -> None:
        """Write down what was asked of a stream."""
        self.log.append(f"{what} on {stream.name}" if stream.name else what)

    # streams and pools of memory

    def stream(self, _device: torch.device | None = None) -> Stream:
        """Another stream."""
        return Stream(self, f"stream {next(self._streams)}")

    def waits(self, stream: Stream, other: Stream, at: int) -> None:
        """A stream goes on when another one has come so far."""
        self.say("stream waits", stream)
        stream.later(lambda: other.run_to(at))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    @contextmanager
    def allocating(self, pool: Any, _device: torch.device) -> Iterator[None]:
        """``torch.cuda.use_mem_pool``."""
        self.pools.append(pool)
        yield

    # cudaHostRegister and its counterpart

    def cudart(self) -> Any:
        """The runtime."""

        def register(address: int, size: int, _flags: int) -> int:
            if not self.refuses:
                self.pinned[address] = size
            return int(self.refuses)

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.pinned.pop)

    def event_class(self) -> type:
        """Events of this device."""
        gpu = self
        numbers = itertools.count(1)

        class Event:
            def __init__(self, enable_timing: bool = False, interprocess: bool = False) -> None:
                self.timed, self.shared, self.at, self.when = enable_timing, interprocess, 0, 0.0
                self.stream = gpu.default

            def record(self, stream: Stream) -> None:
                assert stream is gpu.current[-1]
                gpu.say("record", stream)
                self.stream, self.at, self.when = stream, stream.asked, time.perf_counter()

            def synchronize(self) -> None:
                gpu.say("wait", self.stream)
                self.stream.run_to(self.at)

            def query(self) -> bool:
                return self.stream.done >= self.at

            def wait(self, stream: Stream) -> None:
                gpu.waits(stream, self.stream, self.at)

            def elapsed_time(self, end: Any) -> float:
                assert self.timed
                assert end.timed
                return 1e3 * (end.when - self.when)

            def ipc_handle(self) -> bytes:
                assert self.shared
                handle = b"event %d" % next(numbers)
                gpu.events[handle] = self
                return handle

            @staticmethod
            def from_ipc_handle(_device: torch.device, handle: bytes) -> Any:
                return gpu.events[handle]

        return Event

    def share(self, storage: Any) -> tuple[Any, ...]:
        """``_share_cuda_``."""
        handle = b"storage %d" % len(self.shares)
        self.shares[handle] = storage
        return (5, handle, storage.nbytes(), 0, b"counter", 0, b"event", False)

    def open(self, _device: int, handle: bytes, *_rest: Any) -> Any:
        """``_new_shared_cuda``."""
        self.opened.append(handle)
        return self.shares[handle]


@contextmanager
def installed(patch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Let the package take the CPU for a GPU."""
    gpu = FakeGpu()
    patch.setattr(kinds, "HOST", frozenset())
    properties = SimpleNamespace(name="Fake", uuid=UUID, total_memory=1000, multi_processor_count=10)
    for name, value in {
        "Event": gpu.event_class(),
        "current_stream": lambda _device: gpu.current[-1],
        "default_stream": lambda _device: gpu.default,
        "Stream": gpu.stream,
        "stream": gpu.on,
        "MemPool": object,
        "use_mem_pool": gpu.allocating,
        "device": lambda _device: nullcontext(),
        "cudart": gpu.cudart,
        "default_generators": [torch.Generator()],
        "memory_allocated": lambda _device: 5,
        "max_memory_allocated": lambda _device: 7,
        "get_device_properties": lambda _device: properties,
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: gpu.share(storage))
    patch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(gpu.open))
    patch.setattr(torch, "empty", gpu.empty)
    methods = {"copy_": gpu.copy, "is_pinned": gpu.is_pinned, "record_stream": gpu.record_stream}
    for name, method in methods.items():
        type.__setattr__(Tensor, name, _bound(method))
    try:
        yield gpu
    finally:
        for name in methods:
            type.__delattr__(Tensor, name)


def _bound(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: method(tensor, *args, **kwargs)
