"""A GPU that is none: tensors lie on the CPU, what CUDA would do later is done later, and everything is written down.

A copy to the host that does not block takes place when somebody waits for an event behind it, with the bytes that there
were when it was asked for. So who does not wait reads what was there before, as on a GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raydp_parallel.devices import kinds

UUID = "GPU-12345678"


_copy: Any = torch._C.TensorBase.copy_
_empty: Any = torch.empty


class FakeGpu:
    """The device, and what was asked of it.

    Attributes:
        log: What was asked, in order.
        pinned: Addresses of registered memory, with its sizes.
        refuses: Whether memory cannot be registered.
        shares: What was shared between processes, by handle.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: dict[int, int] = {}
        self.refuses = False
        self.shares: dict[bytes, Any] = {}
        self.events: dict[bytes, Any] = {}
        self.opened: list[bytes] = []
        self.streams = [self.stream("the current stream")]
        self._queue: list[Callable[[], object]] = []
        self.done = 0
        self.asked = 0

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
        self.log.append(what)
        self._queue.append(work)
        self.asked += 1

    def run_to(self, number: int) -> None:
        """Do what was asked up to a moment."""
        while self.done < number:
            self._queue.pop(0)()
            self.done += 1

    def stream(self, name: str) -> Any:
        """A stream, which waits for others."""
        gpu = self

        class Stream:
            def __repr__(self) -> str:
                return name

            def wait_stream(self, other: Any) -> None:
                gpu.log.append(f"{self} waits for {other}")

        return Stream()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """``torch.cuda.stream``."""
        self.streams.append(stream)
        self.log.append(f"on {stream}")
        try:
            yield
        finally:
            assert self.streams.pop() is stream
            self.log.append(f"on {self.streams[-1]}")

    def record_stream(self, _tensor: Tensor, stream: Any) -> None:
        """``Tensor.record_stream``."""
        self.log.append(f"a tensor is used on {stream}")

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

            def record(self, stream: Any) -> None:
                assert stream is gpu.streams[-1]
                gpu.log.append("record")
                self.at, self.when = gpu.asked, time.perf_counter()

            def synchronize(self) -> None:
                gpu.log.append("wait")
                gpu.run_to(self.at)

            def query(self) -> bool:
                return gpu.done >= self.at

            def wait(self, stream: Any) -> None:
                assert stream is gpu.streams[-1]
                gpu.log.append("stream waits")

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
        assert handle not in self.opened, "CUDA opens a handle once"
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
        "current_stream": lambda _device: gpu.streams[-1],
        "Stream": lambda _device: gpu.stream("a stream"),
        "stream": gpu.on,
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
