"""What a tensor is, and what a replica's device is, in plain types that cross the wall."""

from __future__ import annotations

from typing import Any, NamedTuple


class TensorSpec(NamedTuple):
    """How to rebuild one tensor out of a parcel's bytes.

    Attributes:
        dtype: Name of the dtype, as in ``torch.<name>``.
        shape: Its sizes.
        stride: Its strides, in elements.
        offset: Its first byte in the parcel.
        requires_grad: Whether the receiver makes it a leaf that requires a gradient.
        cls: The pickled tensor subclass to restore, None for a plain tensor.
        layout: ``"strided"``, or the name of the layout whose components are ``parts``.
        parts: The specs of the components of a tensor that is not strided.
        extra: Plain values that the layout needs besides, such as whether a sparse tensor is
            coalesced.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    cls: bytes | None = None
    layout: str = "strided"
    parts: tuple[TensorSpec, ...] = ()
    extra: Any = None


class ReplicaHello(NamedTuple):
    """What a replica says of itself when it starts.

    Attributes:
        pid: Its process.
        node: Ray's id of its node.
        device: Its torch device, as text.
        gpu: Name of its GPU, empty on a CPU.
        gpu_uuid: The GPU's uuid, empty on a CPU.
        memory: The device's bytes, 0 on a CPU.
        processors: The device's multiprocessors, 0 on a CPU.
        gpu_index: The GPU's number on its node, empty on a CPU.
        cores: How many cores its process may use, 0 if that was not looked at.
    """

    pid: int
    node: str
    device: str
    gpu: str
    gpu_uuid: str
    memory: int
    processors: int
    gpu_index: str = ""
    cores: int = 0
