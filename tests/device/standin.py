"""A GPU that torch takes for one, in front of a build of torch without CUDA.

`gpu.cpp` is the device; this builds it, loads it before torch is imported, and fills in what such a
torch lacks below its own `torch.cuda`. `install` does so for this process and for all that it
starts. What it does with a program is said in the sources, beside what does it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
LIBRARY = "STANDIN_LIBRARY"
"""Names the library in the environment, so that Pythons that this one starts load it, too."""
_BYTES = 8 << 30

lib: Any = None


def build() -> Path:
    """Build the device, once for each torch and each state of its sources, outside the checkout."""
    (found,) = importlib.machinery.PathFinder.find_spec("torch").submodule_search_locations  # type: ignore
    torch, sources = Path(found), sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    text = b"".join(path.read_bytes() for path in [*sources, torch / "version.py"])
    name = f"standin-{hashlib.sha256(text + found.encode()).hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raydp_parallel"
    library = cache / name
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / name
            subprocess.run(
                [
                    *(_compiler(), "-O1", "-g0", "-std=c++20", "-shared", "-fPIC", "-w"),
                    *("-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS", HERE / "gpu.cpp"),
                    *(f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"),
                    *("-o", made, f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"),
                    *("-lc10", "-ltorch_cpu", "-ltorch_python"),
                ],
                check=True,
            )
            made.rename(library)  # others may have built it meanwhile
    return library


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise FileNotFoundError("the stand-in GPU needs a C++ compiler: g++, or the one of CXX")
    return found


def give() -> None:
    """Let all Pythons that this process starts have the device."""
    os.environ[LIBRARY] = str(build())
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)


def install() -> None:
    """Let this process, before it imports torch, have it, too."""
    give()
    hook()


def hook() -> None:
    """Come before torch as it is imported."""
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the stand-in GPU was there")
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("torch", "torch.cuda"):
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            before, after = (_load, _finish) if name == "torch" else (_fill, lambda _: None)
            before(sys.modules["torch"])
            run(module)
            after(sys.modules["torch"])

        spec.loader.exec_module = exec_module
        return spec


def _load(_: ModuleType) -> None:
    global lib
    lib = ctypes.PyDLL(os.environ[LIBRARY])
    number, word, text = ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
    for name, result, *arguments in (
        ("stream", word, number),
        ("choose_stream", None, number, word),
        ("queue", None, number, word, ctypes.py_object),
        ("kernels_address", ctypes.c_void_p, ctypes.c_void_p),
        ("number", word, text, number),
        ("switch", None, text, number),
        ("generator", ctypes.py_object, number),
        ("register", number, ctypes.c_void_p, ctypes.c_size_t),
        ("unregister", number, ctypes.c_void_p),
        ("resize", None, ctypes.c_void_p, ctypes.c_size_t),
        ("export", None, ctypes.c_void_p, ctypes.POINTER(word)),
        ("open", ctypes.py_object, number, number, word, word, word, number),
        ("elapsed", ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p),
        ("read", None, number, number, word),
    ):
        function = getattr(lib, f"standin_{name}")
        function.restype, function.argtypes = result, arguments
    if lib.standin_install():
        raise RuntimeError("torch had asked for CUDA before the stand-in GPU was there")


def number(name: str, device: int = 0) -> int:
    """Tell a number of the device, such as ``"waits"``: see `standin_number` in `gpu.cpp`."""
    found: int = lib.standin_number(name.encode(), device)
    assert found >= 0, name
    return found


def switch(name: str, value: bool) -> None:
    """Turn a switch of the device: see `standin_switch` in `gpu.cpp`."""
    lib.standin_switch(name.encode(), value)


def fault() -> str:
    """Name what is to go wrong: replicas get this variable, as they do all that are NCCL's."""
    return os.environ.get("NCCL_STANDIN", "")


def _fill(torch: Any) -> None:
    """Give torch what its build left out, before `torch.cuda` looks for it."""
    core = torch._C

    def choose(device: int) -> None:
        if device >= 0 and lib.standin_choose(device):
            raise core.AcceleratorError("CUDA error: invalid device ordinal")

    def exchange(device: int) -> int:
        before: int = lib.standin_current()
        choose(device)
        return before

    def at(device: int) -> int:
        return int(device if device >= 0 else lib.standin_current())

    def choose_stream(stream_id: int, device_index: int, device_type: int) -> None:
        lib.standin_choose_stream(device_index, stream_id)
        choose(device_index)

    def init() -> None:
        count = lib.standin_count()
        torch.cuda.default_generators = tuple(map(lib.standin_generator, range(count)))

    kind = 1  # CUDA's, among c10's types of devices

    class StreamBase(core.Stream):
        def __new__(cls, priority: int = 0, stream_ptr: int = 0, **given: int) -> Any:
            if given.get("device_type"):
                return super().__new__(cls, **given)
            where = torch.device("cuda", lib.standin_current())
            return super().__new__(cls, where, priority=priority)

        cuda_stream = property(lambda self: self.stream_id)

    class EventBase(core.Event):
        def __new__(cls, external: bool = False, **given: bool) -> Any:
            return super().__new__(cls, "cuda", **given)

        def elapsed_time(self, other: Any) -> float:  # torch's own takes no subclass
            return float(lib.standin_elapsed(self.event_id, other.event_id))

    core._CudaStreamBase, core._CudaEventBase = StreamBase, EventBase
    core._CudaDeviceProperties = SimpleNamespace
    core._cudart, core._has_cuda = _Runtime, True
    core._CUDAGraph = core._graph_pool_handle = type("NoGraph", (), {})
    core._cuda_isCurrentStreamCapturing = lambda: False
    core._cuda_getDeviceCount = lambda: lib.standin_count()
    core._cuda_init = init
    core._cuda_isInBadFork = lambda: bool(number("inherited"))
    core._cuda_hasPrimaryContext = lambda device: bool(number("started", device))
    core._cuda_getDevice = lambda: lib.standin_current()
    core._cuda_setDevice = choose
    core._cuda_exchangeDevice = exchange
    core._cuda_maybeExchangeDevice = lambda device: exchange(device)  # another function
    core._cuda_synchronize = lambda: torch.accelerator.synchronize()
    core._cuda_getCurrentStream = lambda d: (lib.standin_stream(at(d)), at(d), kind)
    core._cuda_getDefaultStream = lambda d: (0, at(d), kind)
    core._cuda_getCurrentRawStream = lambda d: lib.standin_stream(at(d))
    core._cuda_setStream = choose_stream
    core._cuda_memoryStats = _statistics
    core._cuda_resetPeakMemoryStats = lambda device: lib.standin_reset_peak(device)
    core._cuda_emptyCache = lambda: None
    core._cuda_ipc_collect = lambda: lib.standin_collect()
    core._cuda_canDeviceAccessPeer = lambda one, other: one != other
    core._cuda_getArchFlags = lambda: "sm_90"
    core._cuda_getCompiledVersion = lambda: 13000
    core._cuda_get_sync_debug_mode = lambda: 0
    core._cuda_CUDAAllocator_AllocatorState = core._set_cached_tensors_enabled = lambda *_: None


def _statistics(device: int) -> dict[str, Any]:
    taken, freed = number("taken", device), number("freed", device)
    bytes_ = {
        "current": number("live", device),
        "peak": number("peak", device),
        "allocated": taken,
        "freed": freed,
    }
    reserved = dict.fromkeys(("current", "peak", "allocated"), number("reserved", device))
    return {
        "allocated_bytes": {"all": bytes_},
        "active_bytes": {"all": bytes_},
        "requested_bytes": {"all": bytes_},
        "reserved_bytes": {"all": reserved | {"freed": 0}},
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


class _Runtime:
    """What torch gives of CUDA's runtime."""

    class cudaError:
        success = 0

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        switch("no_register", fault() == "unregistered")
        return int(lib.standin_register(address, size))

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return int(lib.standin_unregister(address))

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:
        return _BYTES - number("live", device), _BYTES


def _properties(device: int) -> SimpleNamespace:
    number = lib.standin_physical(device)
    what, _, left = fault().partition(" ")  # as "memory 3": GPU 1 has three quarters of the others'
    quarters = {what: int(left)} if number == 1 and left.isdigit() else {}
    return SimpleNamespace(
        name="Stand-in GPU",
        uuid=f"GPU-{number}",
        major=9,
        minor=0,
        total_memory=_BYTES * quarters.get("memory", 4) // 4,
        multi_processor_count=quarters.get("processors", 4),
        warp_size=32,
        is_integrated=False,
    )


def _finish(torch: Any) -> None:
    """Change what torch has found out, and its storages, once it is imported."""
    cuda, plain = torch.cuda, torch.UntypedStorage.__new__
    cuda.memory._set_allocator_settings = lambda text: switch(
        "expandable", "expandable_segments:True" in text
    )
    cuda._queued_calls.clear()  # checks of the machine's driver
    cuda._device_count_nvml = lambda: -1
    cuda.device_count = lambda: lib.standin_count()  # not cached: forked processes differ
    cuda._get_device_properties = _properties
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # without a warning
    torch.distributed.ProcessGroupNCCL = importlib.import_module("nccl").ProcessGroupNCCL
    # Forms that are written in Python import the compiler; those in C++ lie below them.
    torch._meta_registrations._meta_lib_dont_use_me_use_register_meta._destroy()

    def new(cls: Any, *args: Any, device: Any = None, **more: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return plain(cls, *args, **({"device": device} if device else {}), **more)
        size = args[0] if args else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        lib.standin_resize(storage._cdata, size)
        return storage

    def export(storage: Any, *_: Any) -> tuple[Any, ...]:
        handle = (ctypes.c_int64 * 3)()
        lib.standin_export(storage._cdata, handle)
        device, (fd, at, count) = storage.device.index, handle
        memory = f"{os.getpid()} {fd} {at} {lib.standin_physical(device)}".encode()
        return device, memory, storage.nbytes(), 0, memory, count, b"event", False

    def opened(device: int, memory: bytes, size: int, _: int, counts: bytes, count: int, *__: Any):
        pid, fd, at, physical = map(int, memory.split())
        if lib.standin_physical(device) != physical:
            raise RuntimeError("CUDA error: the memory lies on another GPU")
        if fault() == "lossy":
            return new(torch.UntypedStorage, size, device="cuda")
        return lib.standin_open(pid, fd, at, size, count, device).untyped_storage()

    def read(counts: bytes, count: int, *_: Any, **__: Any) -> None:
        pid, fd, *_ = map(int, counts.split())
        lib.standin_read(pid, fd, count)

    kind: Any = torch.UntypedStorage
    kind.__new__, kind.resize_, kind._share_cuda_ = new, resized, export
    kind._new_shared_cuda = staticmethod(opened)
    kind._release_ipc_counter_cuda = staticmethod(read)
