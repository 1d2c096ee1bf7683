"""Descriptions of tensors and of replicas, in plain types that are sent between processes."""

from __future__ import annotations

from typing import Any, NamedTuple


class TensorSpec(NamedTuple):
    """The description by which one tensor is rebuilt from a parcel's bytes.

    Attributes:
        dtype: Name of the dtype, as in ``torch.<name>``.
        shape: Its sizes.
        stride: Its strides, in elements.
        offset: Its first byte in the parcel.
        requires_grad: Whether the receiver makes it a leaf that requires a gradient.
        cls: The pickled tensor subclass to restore, None for a plain tensor.
        layout: ``"strided"``, or the name of a layout with the components ``parts``.
        parts: The specs of the components of a tensor that is not strided.
        extra: Further plain values of the layout, such as whether a sparse tensor is coalesced.
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
    """The description of itself that a replica sends when it starts.

    Attributes:
        pid: The id of its process.
        node: Ray's id of its node.
        device: Its torch device, as text.
        gpu: Name of its GPU, empty on a CPU.
        gpu_uuid: The GPU's uuid, empty on a CPU.
        memory: The device's bytes, 0 on a CPU.
        processors: The device's multiprocessors, 0 on a CPU.
        gpu_index: The GPU's number on its node, empty on a CPU.
        cores: The number of cores that its process may use, 0 if unknown.
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
