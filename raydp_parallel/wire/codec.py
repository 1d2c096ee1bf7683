"""Messages to bytes and back.

A value of the user's becomes a `Parcel`: a pickled skeleton, and its tensors in a row, wherever
pickle reaches. A message, which holds parcels, becomes a `Packet`: pickled bytes, and beside them
the specs and the memory of all plain tensors, of which no byte is ever pickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from raydp_parallel.devices.layout import Layout, Row, Run, Spec, is_dense, part, specs_of
from raydp_parallel.devices.memory import download, upload
from raydp_parallel.wire import pickling
from raydp_parallel.wire.windows import Window

_opening: ContextVar[tuple[Row, Sequence[Window], torch.device]] = ContextVar("opening")
"""The tensors, in some memory, and the windows of the message that is opened, and the device that
its tensors go to.
"""


def _tensor(number: int) -> Tensor:
    return _opening.get()[0][number]  # type: ignore[no-any-return]


def _alone(number: int) -> Tensor:
    return _opening.get()[0][number].detach()  # type: ignore[no-any-return]


def _window(number: int) -> Window:
    return _opening.get()[1][number]


def _row(begin: int, after: int, present: bytes | None) -> Row:
    whole = _opening.get()[0]
    found, layout = whole[begin:after], whole.layout
    assert layout is not None
    if present is not None:
        rest = iter(found)
        found = [next(rest) if one else None for one in present]
    row, at = Row(found), layout.offsets[begin]
    row.layout, row.present = part(layout, begin, after), present
    row.memory = whole.memory[at : at + row.layout.size]
    return row


def decode(data: bytes, row: Row, windows: Sequence[Window], device: torch.device) -> Any:
    """Rebuild a value around its tensors, on a device."""
    opened = copy_context()  # a value's own __setstate__ may open another one
    opened.run(_opening.set, (row, windows, device))
    return opened.run(pickle.loads, data)


class StandIn(Tensor):
    """Stands for a tensor that lies elsewhere: messages get that, which ``writable`` returns."""

    writable: Callable[[], Tensor]


class Parcel(NamedTuple):
    """A value of the user's: its pickle, with numbers in the place of tensors, and these."""

    skeleton: bytes
    tensors: list[Tensor]

    def load(self, tensors: list[Tensor] | None = None) -> Any:
        """Rebuild the value, with other tensors if they are given."""
        return decode(self.skeleton, Row(tensors or self.tensors), (), torch.device("cpu"))


class _ValuePickler(pickling.Pickler):
    tensors: list[Tensor]

    def reducer_override(self, value: object) -> pickling.Reduced:
        if isinstance(value, Tensor) and not (type(value) is Tensor and value.is_meta):
            self.tensors.append(value.writable() if isinstance(value, StandIn) else value)
            return _tensor, (len(self.tensors) - 1,)
        return super().reducer_override(value)


def parcel(value: object, name: str) -> Parcel:
    """Take a value apart. An error names the path to what cannot be sent, below ``name``."""
    file = io.BytesIO()
    pickler = _ValuePickler(file)
    pickler.tensors = []
    try:
        pickler.dump(value)
    except Exception as error:
        raise pickling.unsendable(value, name, error) from None
    return Parcel(file.getvalue(), pickler.tensors)


class Packet(pickle.Pickler):
    """A message: its pickle, and what stands beside it."""

    def __init__(self, message: object) -> None:
        file = io.BytesIO()
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.specs: list[Spec] = []  # the geometry of its tensors
        self.tensors: list[Tensor] = []  # without gaps; some may be part of a graph
        self.windows: list[Window] = []  # memory that it shares, of which descriptors travel
        self.dump(message)
        self.body = file.getvalue()

    def reducer_override(self, value: object) -> pickling.Reduced:
        """Reduce what stands beside the pickle, and nothing else."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Row):
            return self._row(value)
        if isinstance(value, Window):
            self.windows.append(value)
            return _window, (len(self.windows) - 1,)
        return NotImplemented

    def _row(self, value: Row) -> pickling.Reduced:
        begin, found = len(self.tensors), [t for t in value if t is not None]
        grad = any([t.requires_grad for t in found])
        if not found or grad or not self._take(found):
            return Row, ([*value],)
        present = None
        if len(found) < len(value):
            present = bytes([t is not None for t in value])
        return _row, (begin, len(self.tensors), present)

    def _tensor(self, value: Tensor) -> pickling.Reduced:
        reduced: pickling.Reduced = _alone, (len(self.tensors),)
        odd = type(value) is not Tensor and type(value) is not nn.Parameter
        if odd or value.is_nested or value.is_quantized:
            file = io.BytesIO()
            # A clone: the storage may hold other tensors.
            torch.save(value.detach().clone(), file, pickling)
            reduced = _saved, (file.getvalue(),)
        elif value.is_meta:
            return NotImplemented
        elif value.layout is not torch.strided:  # torch describes it by the plain ones that it has
            reduced = _sparse, value.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)[1]
        elif not self._take([value]):  # a copy has no gaps, and the same order of strides
            self._take([value.detach().clone(memory_format=torch.preserve_format)])
        return *reduced, value.requires_grad or None, None, None, Tensor.requires_grad_

    def _take(self, tensors: list[Tensor]) -> bool:
        """Take tensors in one loop, if all are plain and have no gaps: functions of Python cost
        more than the rest.
        """
        for t in tensors:
            odd = (type(t) is not Tensor and type(t) is not nn.Parameter) or t.is_meta
            odd = odd or t.layout is not torch.strided or t.is_nested or t.is_quantized
            if odd or not (t.is_contiguous() or is_dense(t)):
                return False
        self.specs += specs_of(tensors)
        self.tensors += tensors
        return True


def _sparse(kind: torch.layout, parts: tuple[Any, ...]) -> Tensor:
    device = parts[0].device
    if kind is torch.sparse_coo:
        *plain, known = parts
        made = torch.sparse_coo_tensor(
            *plain, is_coalesced=known, check_invariants=False, device=device
        )
    else:
        made = torch.sparse_compressed_tensor(*parts, layout=kind, device=device)
    return made.clone()


def _saved(data: bytes) -> Tensor:
    made: Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return made.to(_opening.get()[2])


Flat = tuple[bytes, bytes, npt.NDArray[np.uint8]]
"""A message for a replica that shares no windows, as a Ray call carries it: its pickle, the
pickled specs of its tensors, and their bytes as an array.
"""


def flat(message: object) -> Flat:
    """Take a message apart."""
    packet = Packet(message)
    layout = Layout(packet.specs)
    run = Run(torch.empty(layout.size, dtype=torch.uint8, device="cpu"))
    download(packet.tensors, layout, run)
    return packet.body, pickle.dumps(layout.specs), run.memory.numpy()


def unflat(parts: Flat, device: torch.device) -> Any:
    """Put a message together. The bytes are copied: those in Ray's object store are read-only."""
    body, specs, data = parts
    layout = Layout(pickle.loads(specs))
    # NumPy gives an empty array a stride of 0, which torch views as no other dtype.
    memory = torch.from_numpy(np.array(data)).as_strided(data.shape, (1,))
    row, _ = upload(layout, Run(memory), device)
    return decode(body, row, (), device)
