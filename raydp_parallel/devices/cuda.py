"""The device that Ray gave this process: taking it, and describing it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from raydp_parallel.devices.threads import cores
from raydp_parallel.errors import log, warn

_VISIBLE = "{}_VISIBLE_DEVICES"
_UNSET = "RAY_EXPERIMENTAL_NOSET_{}_VISIBLE_DEVICES"
"""The user's wish that all GPUs stay visible: CUDA IPC of large tensors hangs behind masks on some
machines.
"""
_COPIERS = 4
"""Threads of host copies in a replica with a GPU."""
_DRIVER = ("/dev/nvidiactl", "/dev/dxg")
"""Files of a machine, or a container, that can use an NVIDIA GPU; the second is Windows's."""


class Hello(NamedTuple):
    """A replica's description of itself. On a CPU all that is a GPU's is empty, or 0."""

    pid: int
    node: str  # Ray's id
    device: str  # as its process sees it
    gpu: str = ""  # the GPU's name
    gpu_uuid: str = ""
    memory: int = 0  # bytes of the GPU's
    processors: int = 0  # the GPU's multiprocessors
    cores: int = 0  # that a CPU replica may use; 0 on a GPU
    near: bool = False  # the driver calls it over a socket


def take_given(kind: str, ids: Sequence[str]) -> torch.device:
    """Take the device that Ray gave this process, and start CUDA there.

    A GPU that Ray only counts, and torch does not find, is replaced by the CPU.

    Args:
        kind: ``"cpu"`` or ``"gpu"``.
        ids: The GPUs that Ray gave, as ``CUDA_VISIBLE_DEVICES`` calls them.

    Raises:
        RuntimeError: CUDA does not start on a machine that has a GPU. Computing on the CPU instead
            would take a hundred times as long, without any message.
    """
    masked = kind == "cpu" or os.environ.get(_named(_UNSET), "") in ("", "0")
    if masked:
        _see_only(ids if kind == "gpu" else ())
    if kind == "cpu" or not (torch.cuda.is_available() or _has_gpus()):
        return torch.device("cpu")
    device = torch.device("cuda", 0 if masked else _number(ids))
    torch.zeros(1, device=device)
    torch.cuda.set_device(device)
    if os.environ.get("OMP_NUM_THREADS") == "1":  # Ray's, where no CPU is booked
        torch.set_num_threads(min(_COPIERS, cores()))
    return device


def _named(variable: str) -> str:
    """Name a variable as Ray does for this torch's kind of GPU."""
    return variable.format("CUDA" if torch.version.hip is None else "HIP")


def _number(ids: Sequence[str]) -> int:
    """Return torch's number of the GPU that Ray gave, among all that are visible."""
    seen = [name.strip() for name in os.environ.get(_named(_VISIBLE), "").split(",")]
    return seen.index(ids[0]) if ids[0] in seen else int(ids[0])


def _see_only(ids: Sequence[str]) -> None:
    """Let CUDA see only these GPUs, before it starts: Ray can be configured not to do so.

    A CPU replica sees none: a module that uses a GPU if there is one would take another replica's.
    """
    wanted = ",".join(ids) or ("" if torch.version.hip is None else "-1")  # ROCm takes "" for all
    if os.environ.get(_named(_VISIBLE)) != wanted and torch.cuda.is_initialized():
        raise RuntimeError(f"CUDA started before it was told to see only GPU {wanted or 'none'}")
    os.environ[_named(_VISIBLE)] = wanted


def _has_gpus() -> bool:
    """Tell if torch ought to find a GPU on this machine."""
    if not any(map(os.path.exists, _DRIVER)):
        return False
    if torch.version.cuda is None:
        log.warning("this machine has a GPU, and this torch is a CPU build: all runs on the CPU")
    return torch.version.cuda is not None


def describe(device: torch.device, node: str) -> Hello:
    """Describe this process and its device, on a node with this id of Ray's."""
    process = os.getpid(), node, str(device)
    if device.type == "cpu":
        return Hello(*process, cores=cores())
    found = torch.cuda.get_device_properties(device)
    size = found.total_memory, found.multi_processor_count
    return Hello(*process, found.name, str(found.uuid), *size)


def own_gpu(uuid: str) -> torch.device | None:
    """Return the GPU that this process and a replica use both; None if there is none: the current
    one may be unused, and CUDA's start takes half a gigabyte there.
    """
    if not uuid or not torch.cuda.is_initialized():
        return None
    for number in range(torch.cuda.device_count()):
        used = torch.cuda.memory_allocated(number)
        if used and str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return torch.device("cuda", number)
    return None


_IMBALANCE = """
    There is an imbalance between your GPUs. You may want to exclude GPU {} which
    has less than 75% of the memory or cores of GPU {}. You can do so by setting
    the device_ids argument to DataParallel, or by setting the CUDA_VISIBLE_DEVICES
    environment variable."""


def check_balance(found: Sequence[tuple[int, Hello]]) -> None:
    """Warn as upstream does if one GPU is much smaller than another.

    Args:
        found: For each replica its device id and its description.
    """
    for name in ("memory", "processors"):
        sizes = {index: getattr(hello, name) for index, hello in found if hello.memory}
        if sizes and min(sizes.values()) < 0.75 * max(sizes.values()):
            warn(_IMBALANCE.format(*[end(sizes, key=sizes.__getitem__) for end in (min, max)]))
            return
