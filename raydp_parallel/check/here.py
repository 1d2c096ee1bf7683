"""The devices of this machine, the versions of its software, and wrappers for the rows."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raydp_parallel.calls.executor import Executor
from raydp_parallel.data_parallel import DataParallel
from raydp_parallel.options import GpuPath, Options

PLAIN = Options(threads=1, metrics=False)
"""One thread each: how a sum is divided among threads decides its last bits."""


class Here:
    """The devices of this machine. Replicas are started for the first row that needs them.

    Args:
        quick: Whether to measure for a short time only.
        gpus: How many GPUs to use; None finds out.
        paths: `Options.gpu_paths` of rows that choose none themselves.
    """

    def __init__(
        self, quick: bool = False, gpus: int | None = None, paths: Sequence[GpuPath] = ()
    ) -> None:
        self.quick = quick
        self._plain = dataclasses.replace(PLAIN, gpu_paths=paths)
        self.gpus = torch.cuda.device_count() if gpus is None else gpus
        self.device = torch.device("cuda", 0) if self.gpus else torch.device("cpu")
        self._executor: Executor | None = None

    @property
    def one(self) -> list[Any]:
        """The ``device_ids`` of one replica."""
        return [0] if self.gpus else ["cpu"]

    @property
    def several(self) -> list[Any]:
        """The ``device_ids`` of several chunks; on a single GPU one replica runs them."""
        if self.gpus > 1:
            return [*range(self.gpus)]
        return [0, 0] if self.gpus else ["cpu", "cpu"]

    def executor(self, options: Options | None = None) -> Executor:
        """The executor that rows share. One with other options is closed first: a GPU belongs to
        one executor at a time.
        """
        options = self._plain if options is None else options
        if self._executor is not None and self._executor.options != options:
            self.close()
        if self._executor is None:
            self._executor = Executor((), options=options)
        return self._executor

    def ours(self, net: nn.Module, ids: Sequence[Any], **more: Any) -> DataParallel[nn.Module]:
        """A net in this package's wrapper, on the first device."""
        return self.wrapped(net.to(self.device), ids, **more)

    def wrapped(
        self, net: nn.Module, ids: Sequence[Any], options: Options | None = None, **more: Any
    ) -> DataParallel[nn.Module]:
        """A net in this package's wrapper, on the device that it is on."""
        return DataParallel(net, ids, executor=self.executor(options), **more)

    def upstreams(
        self, net: nn.Module, ids: Sequence[Any], **more: Any
    ) -> nn.DataParallel[nn.Module]:
        """A net in torch's own wrapper, which needs GPUs."""
        return nn.DataParallel(net.to(self.device), list(ids), **more)

    def rounds(self, full: int) -> int:
        """How often to repeat a measurement that a full run repeats ``full`` times."""
        return max(3, full // 5) if self.quick else full

    def finish(self) -> None:
        """Wait until the devices have finished their work."""
        for index in range(self.gpus):
            torch.cuda.synchronize(index)

    def seconds(self, work: Callable[[], Any], rounds: int, warmup: int = 3) -> float:
        """Seconds that some work takes: the median of all rounds."""
        times = []
        for _ in range(warmup + rounds):
            self.finish()
            begun = time.perf_counter()
            work()
            self.finish()
            times.append(time.perf_counter() - begun)
        return sorted(times[warmup:])[rounds // 2]

    def close(self) -> None:
        """End the replicas."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()


def distances(net: nn.Module, plain: nn.Module) -> list[float]:
    """The `distance` of each gradient of a net from the plain module's."""
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    return [distance(p.grad, q.grad) for p, q in pairs]


def distance(one: Tensor | None, other: Tensor | None) -> float:
    """The norm of the difference of two tensors, as a part of the other's; infinite if one of them
    is missing, or no number.
    """
    if one is None or other is None:
        return math.inf
    found = float((one - other).norm() / other.norm())
    return found if found == found else math.inf


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread on the CPU, as replicas and DDP's workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Compute as repeatably as the devices can: one thread, no short floats, no choice of kernels
    by speed.
    """
    matmul, convolve = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolve.allow_tf32, convolve.deterministic, convolve.benchmark
    matmul.allow_tf32 = convolve.allow_tf32 = convolve.benchmark = False
    convolve.deterministic = True
    try:
        with one_thread():
            yield
    finally:
        matmul.allow_tf32, convolve.allow_tf32, convolve.deterministic, convolve.benchmark = before


def machine() -> dict[str, Any]:
    """The machine and the software that a table was made with."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpus": [
            {
                "name": gpu.name,
                "memory": gpu.total_memory,
                "processors": gpu.multi_processor_count,
                "uuid": str(getattr(gpu, "uuid", "")),
                "capability": f"{gpu.major}.{gpu.minor}",
            }
            for gpu in found
        ],
        "driver": driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if found else None,
        "allocator": os.environ.get(
            "PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        ),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "ray": version("ray"),
        "raydp_parallel": version("raydp-parallel"),
    }


def version(package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver() -> str:
    """The version of NVIDIA's driver, empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = told.stdout.strip().splitlines()
    return lines[0] if told.returncode == 0 and lines else ""


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
