"""Properties of devices: kind, name, memory in use, and whether GPUs are alike."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections.abc import Sequence

import torch

from raydp_parallel.devices.cores import cores
from raydp_parallel.devices.kinds import is_cpu
from raydp_parallel.devices.specs import ReplicaHello

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
