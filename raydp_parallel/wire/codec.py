"""Messages to bytes and back.

A value of the user's becomes a `Parcel`: a pickled skeleton, and its tensors in a row, wherever
pickle reaches. A message, which holds parcels, becomes a `Packet`: pickled bytes, and beside them
the specs and the memory of all plain tensors, of which no byte is ever pickled.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel.devices.layout import Layout, Spec, is_dense
from raydp_parallel.wire import pickling
from raydp_parallel.wire.windows import Window

_opening = threading.local()


def _tensor(number: int) -> Tensor:
    return _opening.tensors[number]  # type: ignore[no-any-return]


def _window(number: int) -> Window:
    return _opening.windows[number]  # type: ignore[no-any-return]


def decode(
    data: bytes,
    tensors: Sequence[Tensor],
    windows: Sequence[Window] = (),
    layout: Layout | None = None,
    memory: Tensor | None = None,
) -> Any:
    """Rebuild a value around its tensors, which lie so in some memory."""
    before = vars(_opening).copy()  # a value's own __setstate__ may open another one
    _opening.tensors, _opening.windows = tensors, windows
    _opening.layout, _opening.memory = layout, memory
    try:
        return pickle.loads(data)
    finally:
        vars(_opening).clear()
        vars(_opening).update(before)


class Row(list[Any]):
    """Tensors, and None, that travel without a look of pickle at each; with ``flags`` it travels
    which of them require a gradient.

    Attributes:
        layout: How those of a row that came lie in its memory; None if they lie apart.
        memory: The bytes of all.
        present: Which places have one; None if all do.
    """

    layout: Layout | None = None
    memory: Tensor
    present: bytes | None = None

    def __init__(self, tensors: Iterable[Tensor | None] = (), flags: bool = True) -> None:
        super().__init__(tensors)
        self.flags = flags


def _row(begin: int, number: int, present: bytes | None) -> Row:
    at, layout = _opening.layout.rows[number]
    found = _opening.tensors[begin : begin + len(layout.specs)]
    if present is not None:
        rest = iter(found)
        found = [next(rest) if one else None for one in present]
    row = Row(found)
    row.layout, row.present = layout, present
    row.memory = _opening.memory[at : at + layout.size]
    return row


class StandIn(Tensor):
    """Stands for a tensor that lies elsewhere: messages get that, which its ``given`` returns."""

    given: Callable[[], Tensor]


class Parcel(NamedTuple):
    """A value of the user's: its pickle, with numbers in the place of tensors, and these."""

    skeleton: bytes | None  # None for a tuple that holds nothing but tensors and Nones
    tensors: list[Any]

    def load(self, tensors: Sequence[Any] | None = None) -> Any:
        """Rebuild the value, with other tensors if they are given."""
        row = self.tensors if tensors is None else tensors
        return tuple(row) if self.skeleton is None else decode(self.skeleton, row)


class _ValuePickler(pickling.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def reducer_override(self, value: object) -> pickling.Reduced:
        if isinstance(value, Tensor):
            self.tensors.append(value.given() if isinstance(value, StandIn) else value)
            return _tensor, (len(self.tensors) - 1,)
        return super().reducer_override(value)


def parcel(value: Any, name: str) -> Parcel:
    """Take a value apart. An error names the path to what cannot be sent, below ``name``."""
    plain = type(value) is tuple and {*map(type, value)} <= {Tensor}
    if plain and len({*map(id, value)}) == len(value):
        return Parcel(None, [*value])
    file = io.BytesIO()
    pickler = _ValuePickler(file)
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
        self.cuts: list[tuple[int, int]] = []  # which of its tensors are rows
        self.dump(message)
        self.body = file.getvalue()

    def reducer_override(self, value: object) -> pickling.Reduced:
        if type(value) is Row:
            return self._reduce_row(value)
        if type(value) is Window:
            self.windows.append(value)
            return _window, (len(self.windows) - 1,)
        if type(value) is Tensor or type(value) is nn.Parameter:
            if value.layout is not torch.strided or value.is_nested or value.is_quantized:
                return _reduce_composed(value)
            if value.is_meta:
                return NotImplemented
            plain = value
            if not is_dense(value):  # a copy has no gaps, and the same order of strides
                plain = value.clone(memory_format=torch.preserve_format)
            spec = Spec(plain.dtype, plain.shape, plain.stride(), value.requires_grad)
            self.specs.append(spec)
            self.tensors.append(plain)
            return _tensor, (len(self.tensors) - 1,)
        if isinstance(value, Tensor):
            return _reduce_subclass(value)
        return NotImplemented

    def _reduce_row(self, row: Row) -> pickling.Reduced:
        """Take all tensors of a row in one loop: functions of Python cost more than the rest."""
        begin, specs, tensors = len(self.tensors), [], list[Tensor]()
        for t in row:
            if t is None:
                continue
            odd = (type(t) is not Tensor and type(t) is not nn.Parameter) or t.is_meta
            odd = odd or t.layout is not torch.strided or t.is_nested or t.is_quantized
            if odd or not (t.is_contiguous() or is_dense(t)):
                return Row, ([*row],)
            spec = (t.dtype, t.shape, t.stride(), row.flags and t.requires_grad)
            specs.append(tuple.__new__(Spec, spec))
            tensors.append(t)
        self.specs += specs
        self.tensors += tensors
        self.cuts.append((begin, len(self.tensors)))
        present = None
        if len(tensors) < len(row):
            present = bytes([t is not None for t in row])
        return _row, (begin, len(self.cuts) - 1, present)


def _reduce_composed(value: Tensor) -> pickling.Reduced:
    """Reduce a tensor to the plain ones that it is made of."""
    plain, grad = value.detach(), value.requires_grad
    if plain.is_nested and plain.numel():
        return _nested, (list(plain.unbind()), grad)
    if plain.layout is torch.sparse_coo:
        parts = plain._indices(), plain._values()
        return _coo, (*parts, tuple(plain.shape), plain.is_coalesced(), grad)
    rows = plain.layout in (torch.sparse_csr, torch.sparse_bsr)
    if rows or plain.layout in (torch.sparse_csc, torch.sparse_bsc):
        outer = plain.crow_indices() if rows else plain.ccol_indices()
        inner = plain.col_indices() if rows else plain.row_indices()
        return _compressed, (outer, inner, plain.values(), tuple(plain.shape), plain.layout, grad)
    return _reduce_whole(value)


def _reduce_subclass(value: Tensor) -> pickling.Reduced:
    kind = type(value)
    if hasattr(kind, "__tensor_flatten__") or value.layout is not torch.strided:
        return _reduce_whole(value)
    plain = value.detach().as_subclass(Tensor)
    return _subclass, (plain, pickling.dumps(kind), value.requires_grad)


def _reduce_whole(value: Tensor) -> pickling.Reduced:
    file = io.BytesIO()
    torch.save(value.detach().clone(), file)  # a clone: the storage may hold other tensors
    return _saved, (file.getvalue(), value.requires_grad)


def _nested(parts: list[Tensor], grad: bool) -> Tensor:
    return torch.nested.nested_tensor(parts, requires_grad=grad)


def _coo(i: Tensor, v: Tensor, shape: tuple[int, ...], coalesced: bool, grad: bool) -> Tensor:
    made = torch.sparse_coo_tensor(
        i, v.clone(), shape, is_coalesced=coalesced, check_invariants=False, device=v.device
    )
    return made.requires_grad_(grad)


def _compressed(
    outer: Tensor, inner: Tensor, v: Tensor, shape: tuple[int, ...], kind: torch.layout, grad: bool
) -> Tensor:
    parts = outer.clone(), inner.clone(), v.clone()
    made = torch.sparse_compressed_tensor(*parts, shape, layout=kind, device=v.device)
    return made.requires_grad_(grad)


def _subclass(plain: Tensor, kind: bytes, grad: bool) -> Tensor:
    made: Tensor = plain.clone().as_subclass(pickle.loads(kind))
    return made.requires_grad_(grad)


def _saved(data: bytes, grad: bool) -> Tensor:
    made: Tensor = torch.load(io.BytesIO(data), map_location=_here, weights_only=False)
    return made.requires_grad_(grad)


def _here(storage: Any, place: str) -> Any:
    """Keep what lay on the sender's GPU on this process's: its number may be another one here."""
    if not place.startswith("cuda"):
        return None
    return storage.cuda() if torch.cuda.is_initialized() else storage
