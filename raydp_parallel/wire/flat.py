"""Messages for a replica that shares no windows: bytes that a Ray call carries."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from raydp_parallel.devices import memory
from raydp_parallel.devices.layout import Layout, Run
from raydp_parallel.wire import codec

Flat = tuple[bytes, bytes, "np.ndarray[Any, Any]"]
"""A message: its pickle, the pickled specs of its tensors, and their bytes as an array."""


def flat(message: object) -> Flat:
    """Take a message apart."""
    packet = codec.Packet(message)
    layout = Layout(packet.specs, cuts=tuple(packet.cuts))
    run = Run(layout.size)
    run.memory = torch.empty(layout.size, dtype=torch.uint8, device="cpu")
    if packet.tensors:
        memory.download(packet.tensors, layout, run)
    return packet.body, pickle.dumps((layout.specs, packet.cuts)), run.memory.numpy()


def unflat(parts: Flat, device: torch.device) -> Any:
    """Put a message together. The bytes are copied: those in Ray's object store are read-only."""
    body, specs, data = parts
    run = Run(data.nbytes)
    run.memory = torch.from_numpy(np.array(data))
    geometry, cuts = pickle.loads(specs)
    layout = Layout(geometry, cuts=cuts)
    tensors, whole, _ = memory.upload(layout, run, device)
    return codec.decode(body, tensors, (), layout, whole)
