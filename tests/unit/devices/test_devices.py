"""CPU and CUDA alike: where outputs go, bytes in and out, seeds, balance."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from fake_gpu import installed

from raydp_parallel import devices
from raydp_parallel.devices import process
from raydp_parallel.devices.ranges import MemoryRange, ReplicaHello
from raydp_parallel.transport import codec

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="indices name GPUs where there are some")
@pytest.mark.parametrize(
    "target", (0, 3, "cuda", "cuda:1", torch.device("cuda", 1), "cpu", torch.device("cpu"))
)
def test_G10_without_cuda_every_target_is_the_cpu(target: int | str | torch.device) -> None:
    """Ids are logical: where the driver has no GPU, its master copy and the outputs are on
    its CPU.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert devices.output_place(target) == CPU


def test_G10_minus_one_is_the_cpu_with_upstreams_warning() -> None:
    """The old way to say so."""
    with pytest.warns(FutureWarning, match="Using -1 to represent CPU tensor is deprecated"):
        assert devices.output_place(-1) == CPU


def test_a_piece_is_a_tensors_memory() -> None:
    """Not a copy of it, and it keeps the tensor alive."""
    tensor = torch.ones(5)
    found = devices.piece(tensor)
    assert (found.address, found.size, found.owner) == (tensor.data_ptr(), 20, tensor)


def source(tensor: torch.Tensor) -> MemoryRange:
    """A packet's bytes."""
    return devices.piece(tensor)


def test_reading_makes_memory_of_its_own() -> None:
    """At the spec's offset, in the spec's strides."""
    packed = torch.arange(20.0)
    spec = codec.spec_of(torch.empty(3, 2).t(), offset=16)
    found = devices.reader(source(packed), CPU)(spec, torch.float32)
    assert found.tolist() == [[4, 6, 8], [5, 7, 9]]
    found.zero_()
    assert packed.tolist() == [*range(20)]


def test_windows_are_read_without_a_copy() -> None:
    """On a CPU they show the packet itself, while it lives; empty ones show nothing."""
    packed = torch.arange(20.0)
    specs = [
        codec.spec_of(torch.empty(2, 2), 8),
        codec.spec_of(torch.empty(0, 3), 0),
        codec.spec_of(torch.empty(()), 4),
    ]
    found = devices.windows(source(packed), specs, [torch.float32] * 3, CPU)
    assert [t.tolist() for t in found] == [[[2, 3], [4, 5]], [], 1]
    packed.add_(1)
    assert found[0].tolist() == [[3, 4], [5, 6]]


def test_uploading_nothing() -> None:
    """No bytes are an empty tensor."""
    assert devices.upload(MemoryRange(0, 0, None), CPU).shape == (0,)
    assert devices.windows(
        MemoryRange(0, 0, None), [codec.spec_of(torch.empty(0))], [torch.float32], CPU
    )[0].shape == (0,)


def draw() -> tuple[float, float, float]:
    """One number of each generator that a forward may use."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@pytest.fixture
def generators() -> object:
    """Leaves the generators as they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


@pytest.mark.usefixtures("generators")
@pytest.mark.parametrize("call_seed", (0, 1, 2**63 - 1, 12345))
def test_A10_seeds_are_a_function_of_call_and_chunk(call_seed: int) -> None:
    """The same call and chunk give the same numbers, whatever was drawn before; other chunks give
    others.
    """
    found = []
    for chunk in (0, 1, 2, 0, 1):
        devices.seed(CPU, call_seed, chunk)
        found.append(draw())
        draw()
    assert found[0] == found[3]
    assert found[1] == found[4]
    for numbers in zip(*found[:3], strict=True):
        assert len(set(numbers)) == 3


@pytest.mark.usefixtures("generators")
def test_A10_the_next_call_of_chunk_0_is_not_this_call_of_chunk_1() -> None:
    """Streams of neighbouring seeds and chunks do not meet."""
    found = set()
    for call_seed in range(8):
        for chunk in range(8):
            devices.seed(CPU, call_seed, chunk)
            found.add(torch.rand(()).item())
    assert len(found) == 64


@pytest.mark.usefixtures("generators")
def test_A10_a_gpus_generator_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the CPU's, from the call and the chunk."""
    seeds = set()
    with installed(monkeypatch):
        for chunk in (1, 2):
            devices.seed(CPU, 5, chunk)
            assert torch.cuda.default_generators[0].initial_seed() == torch.initial_seed()
            seeds.add(torch.initial_seed())
    assert len(seeds) == 2


def gpu(memory: int, processors: int) -> ReplicaHello:
    """A GPU of some size."""
    return ReplicaHello(*(1, "node", "cuda:0", "G", "uuid"), memory=memory, processors=processors)


@pytest.mark.parametrize(
    ("small", "large"), (((70, 10), (100, 10)), ((100, 7), (100, 10)), ((10, 1), (100, 100)))
)
def test_C6_unlike_gpus_are_told_once(small: tuple[int, int], large: tuple[int, int]) -> None:
    """Less than three quarters of another's memory or processors, upstream's text, one warning
    however many differ.
    """
    with pytest.warns(UserWarning) as seen:
        devices.check_balance([(4, gpu(*large)), (7, gpu(*small)), (5, gpu(*large))])
    (warning,) = seen
    assert ("There is an imbalance between your GPUs. You may want to exclude GPU 7 which") in str(
        warning.message
    )
    assert "less than 75% of the memory or cores of GPU" in str(warning.message)


@pytest.mark.parametrize("sizes", ([], [(100, 10)], [(75, 10), (100, 10)], [(100, 8), (100, 10)]))
def test_C6_alike_gpus_are_not(sizes: list[tuple[int, int]]) -> None:
    """Three quarters is enough, and one GPU is like itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        devices.check_balance([(i, gpu(*size)) for i, size in enumerate(sizes)])


def test_a_cpu_says_who_it_is() -> None:
    """Process and node; no GPU."""
    assert devices.describe(CPU, os.getpid(), "node")[:4] == (os.getpid(), "node", "cpu", "")
    devices.finish(CPU)


APART = """
import ctypes, json, os, queue, resource, select, threading, torch
from raydp_parallel import devices
from raydp_parallel.devices import process

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def faults(size):
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        address = ctypes.c_void_p(libc.malloc(size))
        ctypes.memset(address, 1, size)
        libc.free(address)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

torch.set_num_threads(2)
first = len(os.listdir("/proc/self/task"))

def helpers(expected):
    # How many threads there are more than at first; of one that has ended the kernel may tell for a moment.
    for _ in range(1000):
        if len(os.listdir("/proc/self/task")) - first == expected: break
        select.poll().poll(1)
    return len(os.listdir("/proc/self/task")) - first

def compute():
    torch.ones(1 << 20).add_(1)

def elsewhere():
    compute()
    met.wait()
    met.wait()  # while the other one rests
    seen.append(helpers(2))
    devices.rest()

seen = []
for work, expected in ((compute, 1), (devices.rest, 0), (devices.rest, 0), (compute, 1), (devices.rest, 0)):
    work()
    seen.append(helpers(expected))
compute()
met = threading.Barrier(2)
thread = threading.Thread(target=elsewhere)
thread.start()
met.wait()
seen.append(helpers(3))
devices.rest()
met.wait()
thread.join()
seen.append(helpers(0))
library = process._openmp()
inside = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: devices.rest())
library.GOMP_parallel(inside, None, 2, 0)
seen.append(helpers(1))
devices.rest()
seen.append(helpers(0))

devices.keep_freed_memory()
found, kept = queue.SimpleQueue(), []
for name in ("one", "two"):
    sizes = (10 << 20, 100 << 20)
    devices.start_thread(lambda: found.put([threading.current_thread().name, *map(faults, sizes)]), name)
    kept.append(found.get())
print(json.dumps([seen, *kept]))
"""


@pytest.fixture(scope="module")
def apart() -> list[Any]:
    """What a process of its own found out."""
    done = subprocess.run(
        [sys.executable, "-c", APART], capture_output=True, text=True, timeout=240
    )
    assert not done.returncode, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(
    process._openmp() is None, reason="torch computes with another library than GCC's"
)
def test_a_thread_that_waits_for_replicas_leaves_them_the_cores(apart: list[Any]) -> None:
    """Its helpers end, and come back with its next operation; not inside of one, and those of other
    threads stay.
    """
    assert apart[0] == [1, 0, 0, 1, 0, 3, 2, 0, 1, 0]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_who_says_how_threads_wait_is_heard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they do so in calls, too."""
    monkeypatch.setenv(name, "1")
    assert process._find_pause() is process._nothing


@pytest.mark.parametrize(
    "names", [("GOMP_parallel", "kmp_set_blocktime", "omp_pause_resource"), ("GOMP_parallel",)]
)
def test_threads_of_other_libraries_are_left_alone(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intel's has GCC's names, too; an old one of GCC's cannot end its threads."""
    library = SimpleNamespace(**dict.fromkeys(names))
    monkeypatch.setattr(process.ctypes, "CDLL", lambda *_args, **_kwargs: library)
    assert process._find_pause() is process._nothing
    process._nothing()


def test_memory_that_a_replicas_thread_frees_is_kept(apart: list[Any]) -> None:
    """Also of tensors larger than the heaps that threads usually have: nothing is asked of the
    kernel again.
    """
    assert [name for name, *_ in apart[1:]] == ["one", "two"]
    assert all(faults < 100 for _, *each in apart[1:] for faults in each), apart[1:]


UNDER_ANOTHER_ALLOCATOR = """
import queue
from raydp_parallel import devices
from raydp_parallel.devices import process
done = queue.SimpleQueue()
devices.keep_freed_memory()
for number in range(3):
    devices.start_thread(lambda: done.put(1), "work")
print(process._allocator() is None, process._in_main_heap(), *[done.get() for _ in range(3)])
"""


@pytest.mark.long
def test_nothing_is_read_or_set_of_an_allocator_that_is_not_libcs() -> None:
    """What lies before a piece of its memory means something else, or is not mapped. Ray brings
    such a library.
    """
    other = Path(ray.__file__).parent / "core" / "libjemalloc.so"
    ours = "False" if platform.libc_ver()[0] == "glibc" else "True"
    for preloaded, none in (("", ours), (str(other), "True")):
        done = subprocess.run(
            [sys.executable, "-c", UNDER_ANOTHER_ALLOCATOR],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "LD_PRELOAD": preloaded},
        )
        assert done.stdout.split() == [none, "True", "1", "1", "1"], done.stderr


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "300000 100000"}, 3),
        ("0::/hosts/path\n", {"cpu.max": "700000 100000"}, 7),
        (
            "12:cpu,cpuacct:/docker/x\n0::/\n",
            {"cpu,cpuacct/docker/x/cpu.cfs_quota_us": "250000"},
            2,
        ),
        ("12:cpu,cpuacct:/docker/x\n", {"cpu/cpu.cfs_quota_us": "250000"}, 2),
        ("12:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1"}, 64),
        ("7:memory:/m\n", {"memory/m/cpu.cfs_quota_us": "100000"}, 64),
        ("0::/\n", {"cpu.max": "what is this"}, 64),
        ("", {}, 64),
    ],
)
def test_cores_are_those_that_a_process_may_use(
    groups: str,
    files: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By affinity, and by the quota of each control group above it; both versions, and with the
    host's paths.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
        (tmp_path / name).with_name("cpu.cfs_period_us").write_text("100000\n")
    assert process.cores(tmp_path, tmp_path / "own") == expected


def test_cores_are_those_of_the_affinity(tmp_path: Path) -> None:
    """Where nothing limits the time on them; also if control groups cannot be looked at."""
    assert process.cores(tmp_path, tmp_path / "none") == len(os.sched_getaffinity(0))
    assert devices.describe(CPU, 1, "node").cores == process.cores()
