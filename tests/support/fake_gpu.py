"""A GPU that is none: it runs the package's CUDA code on this machine's memory.

Memory of a GPU is a run of shared memory, so that another process can open it; a tensor lies on
the GPU whose run holds it. What kernels make lies there, at once on the default stream. What CUDA
would do later is done later: a copy to pinned memory, or to memory that another process has open,
and all that runs on another stream, takes place when that is waited for, and until then other bytes
are there. A copy from pinned memory arrives at once, but its source must be the same when the
stream is waited for.

It refuses what a GPU refuses: memory of two devices in one operation, a second opening of one
export, the next kernel after an error that nobody took, and in the driver random numbers of the
program's own generator. It counts, by side: ``calls`` of tensors, ``copies`` (of `_foreach_copy_`
one where all has one dtype on one GPU, else one per tensor), among them ``crossings`` of devices,
and ``waits`` of the host.

`installed` is for a test, `install` for the process of a replica.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import pickle
import socket
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from raydp_parallel.devices import memory
from raydp_parallel.devices.cuda import describe
from raydp_parallel.devices.layout import is_dense
from raydp_parallel.errors import TransferError
from raydp_parallel.replica import exceptions, replica
from raydp_parallel.replica.replica import Replica
from raydp_parallel.state.lagging import PLAINLY
from raydp_parallel.wire import trial
from raydp_parallel.wire.channel import Channel
from raydp_parallel.wire.messages import Answer

CPU = torch.device("cpu")
PINNED = torch.device("cpu", 7)
"""Stands for pinned memory, as the home of a run."""
POISON = 0xDD
_SIZE = 1 << 31
_ALL, _NCCL = 80 << 30, 1 << 30  # bytes of a GPU, and what a communicator takes there
_STEP = 512
_device: Any = torch._C.TensorBase.device
_host_copy: Any = torch.ops.aten.copy_.default
_NO_ROWS = (torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e8m0fnu)
_RANDOM = torch.Tag.nondeterministic_seeded
_WAITING = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")


class Memory:
    """A run of memory that has a home. Blocks are used again when no tensor looks at them."""

    def __init__(self, home: torch.device, path: str | None = None) -> None:
        self.home = home
        self.fd = os.memfd_create("fake gpu") if path is None else os.open(path, os.O_RDWR)
        os.ftruncate(self.fd, _SIZE)
        self.map = mmap.mmap(self.fd, _SIZE)
        self.base = ctypes.addressof(ctypes.c_uint8.from_buffer(self.map))
        self._end, self._free = 0, {}  # type: ignore[var-annotated]
        self.taken = self.most = 0

    def take(self, size: int) -> Tensor:
        """Give a block of bytes that hold nothing of use."""
        size = max(_STEP, -(-size // _STEP) * _STEP)
        free = self._free.setdefault(size, [])
        at = free.pop() if free else self._end
        self._end = max(self._end, at + size)
        block = (ctypes.c_uint8 * size).from_buffer(self.map, at)
        self.taken += size
        self.most = max(self.most, self.taken)
        weakref.finalize(block, self._give_back, at, size).atexit = False
        found = torch.frombuffer(block, dtype=torch.uint8)
        return found.fill_(POISON) if size < 1 << 20 else found

    def _give_back(self, at: int, size: int) -> None:
        self._free[size].append(at)
        self.taken -= size

    def at(self, offset: int, size: int) -> Tensor:
        """Show bytes that another process may have taken."""
        return torch.frombuffer(
            (ctypes.c_uint8 * size).from_buffer(self.map, offset), dtype=torch.uint8
        )


class Stream:
    """A stream, with what it does later: whether that writes, and the work.

    Attributes:
        late: Whether it does all of its work later.
    """

    gpus: FakeGpus

    def __init__(self, device: Any = None, late: bool = True) -> None:
        self.device, self.late = device, late
        self.queue: list[Any] = []

    def synchronize(self) -> None:
        """Let the host wait."""
        self.gpus.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Work behind another stream's."""
        other.write()

    def write(self) -> None:
        """Do what was put off, for an operation that comes behind it."""
        with _disable_current_modes():
            for writes, work in self.queue:
                if writes:
                    work()
        self.queue[:] = [one for one in self.queue if not one[0]]


class FakeGpus(TorchDispatchMode):
    """All GPUs of a process, and what was asked of them.

    Attributes:
        counts: Calls of tensors, copies and waits, by side and kind, such as ``"driver waits"``.
        side: Whose work is counted now; each has a stream.
        registers: Whether host memory may be registered.
        nccl: How many communicators NCCL has made.
        lossy: Whether what is written to exported memory does not arrive, as with a broken IOMMU.
        torn: Copies from the host whose source changed too early.
    """

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.memories = [Memory(torch.device("cuda", i)) for i in range(count)]
        self.pinned = Memory(PINNED)
        self._runs = [(m.base, m.base + _SIZE, m.home) for m in [*self.memories, self.pinned]]
        self._registered: dict[int, int] = {}
        self._shared: list[tuple[int, int]] = []
        self._opened: dict[bytes, Memory] = {}  # which keep their addresses
        self._own = threading.local()
        self._stream: Any = type("Stream", (Stream,), {"gpus": self})
        self._streams: dict[str, Stream] = {}
        self._ran: list[tuple[range, Stream]] = []  # which nodes of graphs ran on which
        self.counts: Counter[str] = Counter()
        self.registers, self.lossy, self.torn, self.nccl = True, False, list[int](), 0
        self._error = ""
        self._read: dict[bytes, Tensor] = {}
        self.expandable = False
        self.killed: list[Any] = []  # what ended processes had opened, and never let go of

    @property
    def side(self) -> str:
        """Tell whose work this thread does."""
        return getattr(self._own, "side", "driver")

    @side.setter
    def side(self, value: str) -> None:
        self._own.side = value

    def stream(self, _: Any = None) -> Stream:
        """``torch.cuda.current_stream``: there is one for all GPUs."""
        chosen = vars(self._own).get("stream " + self.side)
        return chosen or self._streams.setdefault(self.side, self._stream(late=False))

    def choose(self, stream: Stream) -> None:
        """``torch.cuda.set_stream``."""
        vars(self._own)["stream " + self.side] = stream

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        before, begin = self.stream(), _sequence()
        self.choose(stream)
        try:
            yield
        finally:
            self.choose(before)
            self._ran.append((range(begin, _sequence()), stream))

    def backward(self, t: Any, *args: Any, **more: Any) -> None:
        """``Tensor.backward``: a node runs on its forward's stream, behind whoever made what it
        gets. Leaves, and a Fork, which is on no GPU, run on the caller's.
        """
        caller, nodes = self.stream(), [t.grad_fn]

        def begin(grads: Any, stream: Stream) -> None:
            if stream is not self.stream() and any(grad is not None for grad in grads):
                stream.wait_stream(self.stream())
            self.choose(stream)

        for node in nodes:
            nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]
            ran = [stream for made, stream in self._ran if node._sequence_nr() in made]
            stream = ran[0] if ran and "Fork" not in node.name() else caller
            node.register_prehook(partial(begin, stream=stream))
        _backward(t, *args, **more)
        self.choose(caller)

    # where tensors lie

    def home(self, t: Tensor) -> torch.device:
        """Return the run that holds a tensor."""
        return PLAINLY(self._home, (), (t,))  # type: ignore[no-any-return]

    def _home(self, t: Tensor) -> torch.device:
        if t.layout is not torch.strided or t.is_meta or _device.__get__(t) != CPU:
            return _device.__get__(t)  # type: ignore[no-any-return]
        try:
            at = torch._C.TensorBase.data_ptr(t) or t.untyped_storage().data_ptr()
        except RuntimeError:
            return CPU
        for begin, end, home in self._runs:
            if begin <= at < end:
                return home
        if any(begin <= at < begin + size for begin, size in self._registered.items()):
            return PINNED
        return CPU

    def device(self, t: Tensor) -> torch.device:
        """``Tensor.device``."""
        found = self.home(t)
        return CPU if found == PINNED else found

    def _here(self, t: Tensor, home: torch.device) -> Tensor:
        """Move what an operation made to its home."""
        if self.home(t) != CPU or t.layout is not torch.strided:
            return t
        memory = self.pinned if home == PINNED else self.memories[home.index or 0]
        storage = t.untyped_storage()
        found = memory.take(storage.nbytes())
        whole = found[: storage.nbytes()].view(t.dtype)
        made = whole.as_strided(t.shape, t.stride(), t.storage_offset())
        return made.copy_(t)

    def _exported(self, t: Tensor) -> bool:
        at = t.data_ptr()
        return any(begin <= at < end for begin, end in self._shared)

    # operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        more = dict(kwargs or {})
        given = more.get("device")
        name = func._schema.name.partition("::")[2]
        self.count("calls")
        if name.startswith("_foreach_") and name.endswith("_"):
            torch.autograd.graph.increment_version(args[0])  # as the kernels of CPU and GPU do
        if name == "copy_":
            return self.copy(*args, **more)
        if name == "_foreach_copy_":
            return self.foreach_copy(*args, **more)
        if given is not None:
            more["device"], given = CPU, torch.device(given)
        pin = more.pop("pin_memory", None)
        tensors = [t for t in tree_flatten((args, more))[0] if isinstance(t, Tensor)]
        homes = {self.home(t) for t in tensors if t.dim()} or {self.home(t) for t in tensors}
        gpus = {home for home in homes if home.type == "cuda"}
        if not gpus and (given is None or given.type == "cpu"):
            found = func(*args, **more)
            return self._here(found, PINNED) if pin else found
        if not func.is_view and self._error:
            error, self._error = self._error, ""
            raise RuntimeError(error)
        own = self.side == "driver" and not replica.own_process  # a module draws what it likes
        if _RANDOM in func.tags and not more.get("generator") and own:
            raise RuntimeError(f"the program's own random numbers move, by {name}")
        if len(homes) > 1 and not name.startswith(("index", "_index")):
            text = f"Expected all tensors to be on the same device, but found {homes} in {name}"
            raise RuntimeError(text)
        if gpus and not func.is_view:
            self.stream().write()
        if name in _WAITING:
            self.wait()
        if name == "clone":
            self.count("copies")
        found = func(*args, **more)
        home = given if given is not None else gpus.pop()
        if home.type == "cpu":
            return found
        found = tree_map(lambda t: self._here(t, home) if isinstance(t, Tensor) else t, found)
        if self.stream().late and not func.is_view:
            made = tree_flatten(args[0] if found is None else found)[0]  # None: written in place
            for t in [t for t in made if isinstance(t, Tensor)]:
                self._later([t], [t])
        return found

    def copy(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``Tensor.copy_``."""
        homes = self.home(into), self.home(source)
        if all(home.type == "cpu" for home in homes):
            return _host_copy(into, source)  # type: ignore[no-any-return]
        self.count("copies")
        self.stream().write()
        if homes[0] != homes[1]:
            self.count("crossings")
        if CPU in homes or (PINNED in homes and not non_blocking):
            self.wait()
            return _host_copy(into, source)  # type: ignore[no-any-return]
        late = self.stream().late or self._exported(into)
        if homes[1] == PINNED:
            then = source.clone()
            self.stream().queue.append((False, lambda: self._check(source, then)))
        if homes[0] == PINNED or late:
            self._later([into], [source])
            return into
        return _host_copy(into, source)  # type: ignore[no-any-return]

    def foreach_copy(self, into: list[Tensor], source: list[Tensor], more: bool = False) -> None:
        """``torch._foreach_copy_``: one operation for one dtype on one GPU, else one for each
        tensor.
        """
        homes = {self.home(t) for t in (*into, *source)}
        (dtype, *others), alike = {t.dtype for t in (*into, *source)}, True
        for a, b in zip(into, source, strict=True):
            alike = alike and a.stride() == b.stride() and is_dense(a)
        if homes != {CPU} and (len(homes) > 1 or others or not alike):
            for a, b in zip(into, source, strict=True):
                self.copy(a, b, more)
            return
        if homes == {CPU}:
            torch.ops.aten._foreach_copy_.default(into, source)
            return
        if dtype in _NO_ROWS:
            raise NotImplementedError(f'"foreach_tensor_copy" not implemented for {dtype}')
        self.count("copies")
        self.stream().write()
        if self.stream().late or self._exported(into[0]):
            self._later(into, source)
        else:
            torch.ops.aten._foreach_copy_.default(into, source)

    def _later(self, into: list[Tensor], source: list[Tensor]) -> None:
        """Copy when the stream is waited for; until then nothing of use is there."""
        then = [t.clone() for t in source]
        for t in into:
            if t.numel():
                ctypes.memset(t.data_ptr(), POISON, t.element_size())
        copy: Any = torch.ops.aten._foreach_copy_.default
        self.stream().queue.append((True, lambda: copy(into, then)))

    def _check(self, source: Tensor, then: Tensor) -> None:
        if not torch.equal(source.view(torch.uint8), then.view(torch.uint8)):
            self.torn.append(then.nbytes)

    def wait(self, stream: Stream | None = None) -> None:
        """Let the host wait for a stream, by default the current one."""
        self.count("waits")
        stream = stream or self.stream()
        with _disable_current_modes():
            for _, work in stream.queue:
                work()
        stream.queue.clear()

    def count(self, kind: str) -> None:
        """Count one more."""
        self.counts[f"{self.side} {kind}"] += 1

    # torch's functions

    def to(self, t: Tensor, *args: Any, **more: Any) -> Tensor:
        """``Tensor.to``."""
        copy = more.pop("copy", False)
        device, dtype, later, shape = torch._C._nn._parse_to(*args, **more)
        made = t if dtype is None or dtype == t.dtype else _to(t, dtype)
        if device is None or self.device(t) == self._full(device):
            return made.clone() if copy and made is t else made
        keeps: Any = {} if shape is None else {"memory_format": shape}
        if made.requires_grad and torch.is_grad_enabled():
            return _Moved.apply(made, self._full(device), later)  # type: ignore[no-any-return,no-untyped-call]
        found = torch.empty_like(made, device=self._full(device), **keeps)
        return found.copy_(made.detach(), non_blocking=later)

    def _full(self, device: torch.device) -> torch.device:
        return torch.device("cuda", device.index or 0) if device.type == "cuda" else CPU

    def register(self, address: int, size: int, _flags: int) -> int:
        """``cudaHostRegister``."""
        if not self.registers or address in self._registered:
            self._error = "CUDA error: operation not supported"
            return 801
        self._registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        """``cudaHostUnregister``."""
        return 0 if self._registered.pop(address, None) else 1

    def reduce(self, t: Tensor) -> Any:
        """``reductions.reduce_tensor``, of a tensor that begins its allocation."""
        memory = next(m for m in self.memories if m.home == self.device(t))
        at = t.data_ptr() - memory.base
        self._shared.append((t.data_ptr(), t.data_ptr() + t.nbytes))
        handle = pickle.dumps((os.getpid(), memory.fd, at, next(_exports)))
        kind = (type(t), t.size(), t.stride(), 0, torch.TypedStorage, t.dtype)
        if self.expandable:
            raise RuntimeError("pidfd_getfd: Operation not permitted")
        self._read[handle] = t  # until its reader lets go of it
        rest = (handle, t.nbytes, 0, False, handle, 0, b"event", False)
        return reductions.rebuild_cuda_tensor, (*kind, memory.home.index, *rest)

    def open(self, *given: Any) -> Tensor:
        """``reductions.rebuild_cuda_tensor``."""
        handle = given[7]
        if handle in self._opened:
            raise RuntimeError("CUDA error: this export was opened before")
        pid, fd, at, _ = pickle.loads(handle)
        memory = Memory(torch.device("cuda", given[6]), f"/proc/{pid}/fd/{fd}")
        self._opened[handle] = memory
        self._runs.append((memory.base, memory.base + _SIZE, memory.home))
        self._shared.append((memory.base + at, memory.base + at + given[8]))
        found = memory.at(at, given[8])
        weakref.finalize(found.untyped_storage(), self.unread, handle).atexit = False
        if self.lossy:
            found = self.memories[0].take(given[8])
        return found.view(given[5]).as_strided(given[1], given[2])

    def unread(self, handle: bytes, _: int = 0) -> None:
        """``UntypedStorage._release_ipc_counter_cuda``."""
        self._read.pop(handle, None)

    def settings(self, text: str) -> None:
        """``torch.cuda.memory._set_allocator_settings``."""
        self.expandable = "expandable_segments:True" in text

    def properties(self, device: Any = 0) -> Any:
        """``torch.cuda.get_device_properties``: the number on the machine is the uuid."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        masks = os.environ.get("HIP_VISIBLE_DEVICES"), os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = next(filter(None, masks), "0,1,2,3,4,5,6,7").split(",")
        rest = {"total_memory": 1000, "multi_processor_count": 10}
        return SimpleNamespace(name="Fake", uuid=f"GPU-{seen[index]}", **rest)

    def cuda(self) -> dict[str, Any]:
        """The functions of `torch.cuda`."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = len(self.memories) if seen is None else len([*filter(None, seen.split(","))])
        return {
            "is_available": lambda: count > 0,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: count,
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "current_stream": self.stream,
            "Stream": self._stream,
            "stream": self.use,
            "synchronize": lambda *_: self.wait(),
            "_sleep": lambda _: None,
            "ipc_collect": lambda: None,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self.register, cudaHostUnregister=self.unregister
            ),
            "default_generators": [torch.Generator()] * 8,
            "get_device_properties": self.properties,
            "memory_allocated": lambda i=0: self.memories[i].taken,
            "max_memory_allocated": lambda i=0: self.memories[i].most,
            "mem_get_info": lambda i=0: (_ALL - self.memories[i].taken - self.nccl * _NCCL, _ALL),
        }


_to: Any = torch._C.TensorBase.to
_backward: Any = Tensor.backward
_sequence: Any = torch._C._autograd._get_sequence_nr
_exports = itertools.count()


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, home: torch.device, later: bool) -> Tensor:
        ctx.home = t.device
        return torch.empty_like(t, device=home).copy_(t, non_blocking=later)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.to(ctx.home), None, None


def _patch(gpus: FakeGpus) -> pytest.MonkeyPatch:
    found = pytest.MonkeyPatch()
    for name, value in gpus.cuda().items():
        found.setattr(torch.cuda, name, value)
    found.setattr(torch.version, "cuda", "fake")
    found.setattr(torch.cuda.memory, "_set_allocator_settings", gpus.settings)
    release = staticmethod(gpus.unread)
    found.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release)
    found.setattr(reductions, "reduce_tensor", gpus.reduce)
    found.setattr(reductions, "rebuild_cuda_tensor", gpus.open)
    found.setattr(Tensor, "device", property(gpus.device))
    found.setattr(Tensor, "is_cuda", property(lambda t: gpus.device(t).type == "cuda"))
    found.setattr(Tensor, "is_cpu", property(lambda t: gpus.device(t).type == "cpu"))
    found.setattr(Tensor, "to", lambda t, *args, **more: gpus.to(t, *args, **more))
    found.setattr(Tensor, "backward", lambda t, *args, **more: gpus.backward(t, *args, **more))
    found.setattr(Tensor, "cpu", lambda t: gpus.to(t, CPU))
    found.setattr(
        Tensor, "cuda", lambda t, i=0, **more: gpus.to(t, torch.device("cuda", i), **more)
    )
    found.setattr(Tensor, "tolist", lambda t: torch._C.TensorBase.tolist(gpus.to(t, CPU)))
    found.setattr(Tensor, "record_stream", lambda t, stream: None)
    found.setattr(Tensor, "is_pinned", lambda t: gpus.home(t) == PINNED)
    return found


@contextmanager
def installed(count: int = 1) -> Iterator[FakeGpus]:
    """Let this process have GPUs for a block, in this thread."""
    gpus = FakeGpus(count)
    patches = _patch(gpus)
    vars(memory._pinned).clear()
    memory._may_register.cache_clear()
    try:
        with gpus:
            yield gpus
    finally:
        gc.collect()  # windows end before the functions that end their registration
        patches.undo()
    assert not gpus.torn, f"sources of copies were changed too early: {gpus.torn}"


def install() -> None:
    """Let this process of a replica have GPUs, in each thread that makes a channel."""
    trial._PRODUCTS = 1
    gpus = FakeGpus(1)
    gpus.side = "replica"
    _patch(gpus)
    entered = threading.local()
    make: Any = Channel.__init__

    def made(self: Channel, *args: Any, **more: Any) -> None:
        if not hasattr(entered, "mode"):
            entered.mode = gpus.__enter__()
        make(self, *args, **more)

    Channel.__init__ = made  # type: ignore[method-assign]
    zeros: Any = torch.zeros
    torch.zeros = lambda *a, device=None, **more: zeros(*a, **more)  # where nothing is entered yet


def install_with_nccl() -> None:
    """Let this process of a replica have GPUs, and NCCL among them."""
    import fake_nccl

    trial.SIZES[:] = [1 << 16]
    fake_nccl.install()
    install()


class Near:
    """A replica of this process with a GPU, called over a socket as one of its own process."""

    def __init__(self, gpus: FakeGpus, index: int, ipc: bool) -> None:
        self._gpus, device = gpus, torch.device("cuda", index)
        self.hello = describe(device, "driver")._replace(near=True)
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        self.channel, self._theirs = Channel(ours, summed=True), Channel(theirs, device, True)
        if ipc and not index:  # the driver's own
            self.channel.ipc = self._theirs.ipc = device
        self.link = "ipc" if self.channel.ipc else "windows"
        self._replica = Replica(device)
        self._owed: deque[int] = deque()

    moved = property(lambda self: self.channel.moved)
    unsent = property(lambda self: self.channel.unsent)

    def send(self, request: Any, timeout: float | None) -> None:
        """Send a request, and let the replica answer it."""
        self.channel.send(request, timeout)
        before, self._gpus.side = self._gpus.side, "replica"
        try:
            with torch.enable_grad(), torch.inference_mode(False):
                try:
                    answer = self._replica.answer(self._theirs.receive())
                except TransferError as error:
                    failure = exceptions.failure(error, None)
                    answer = Answer(failure=failure, lacking=True)
                self._theirs.send(answer)
                self._replica.prepare()
        finally:
            self._gpus.side = before

    def receive(self, timeout: float | None, *where: Any) -> Any:
        """Return the next answer."""
        return self.channel.receive(timeout, *where)

    def alive(self) -> bool:
        """Say yes."""
        return True

    def deliver(self, number: int, ref: Any) -> None:
        """Deliver nothing."""

    show = deliver  # type: ignore[assignment]

    def cause(self) -> None:
        """Know none."""

    def close(self) -> None:
        """Hang up."""
        self.channel.close()
        self._gpus.killed.append(self._theirs._in.pop(True, None))
        self._theirs.close()

    end = kill = close


class NearStarter:
    """Starts replicas in this process; the methods are those of `Starter`."""

    def __init__(self, make: Any) -> None:
        self._make, self.ended = make, threading.Event()

    def alive(self) -> bool:
        """Say yes."""
        return True

    def threads(self, _chunks: int) -> int:
        """One."""
        return 1

    def start(self, wanted: Mapping[Any, int], background: bool = False) -> dict[Any, Near]:
        """Start a replica in each place."""
        return {place: self._make(index) for place, index in wanted.items()}

    def release(self, _wanted: Any = None) -> None:
        """Release nothing."""


def near_replicas(gpus: FakeGpus, patch: Any, ipc: bool = False) -> None:
    """Let all replicas be those of `Near`."""

    def starter(_name: str, _options: Any) -> NearStarter:
        return NearStarter(lambda index: Near(gpus, index, ipc))

    patch.setattr("raydp_parallel.cluster.replica_set.Starter", starter)
    patch.setattr("raydp_parallel.cluster.placement.check_gpus", lambda *_: None)
