"""Nested values to messages and back: a pickled skeleton, and the tensors' bytes beside it.

```
 encode:  value ──► skeleton, tensors ──► specs, bytes ──► a parcel
```

Tensors are found wherever pickle reaches, also in objects of the user's classes. Each is sent once,
so that a tensor that occurs in two places of a value does so on the other side too. No raw tensor
is ever pickled. The pickler takes values that cloudpickle does not: standard streams, and objects
with a `__getattr__` that asks another object.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import ctypes
import functools
import importlib
import io
import logging
import math
import operator
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import cloudpickle
import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.devices.ranges import (
    COPIED,
    Attachment,
    MemoryRange,
    RowPlan,
    SpecRow,
    TensorSpec,
    address_of,
    aligned,
)
from raydp_parallel.errors import TransferError
from raydp_parallel.transport.links.link import Attachments
from raydp_parallel.transport.messages import ChunkRef, Parcel

_STREAMS = ("stdout", "stderr", "stdin")
_NAMES: dict[Any, str] = {"<stdin>": "stdin", "<stdout>": "stdout", "<stderr>": "stderr"}
_NAMES |= {0: "stdin", 1: "stdout", 2: "stderr"}
"""The names that standard streams have when Python opened them, or when a number did."""

_HOOKS = (
    "__setstate__",
    "__getstate__",
    "__reduce__",
    "__reduce_ex__",
    "__getnewargs__",
    "__getnewargs_ex__",
)


_OPERATORS = (type(torch.ops.aten.relu), type(torch.ops.aten.relu.default))
"""The classes of torch's operators, with all their overloads and with one."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's pickler, extended by the values that this file handles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:
        """The reduction of a value that pickle cannot handle itself."""
        name = stream_name(value)
        if name is not None:
            return _stream, (name,)
        kind: Any = type(value)
        if isinstance(value, _OPERATORS):
            return operator.attrgetter(str(value)), (torch.ops,)
        # a class is pickled by its name, even if its metaclass has a `__getattr__`
        if issubclass(kind, type):
            if _is_renamed(value):
                return getattr, (sys.modules[value.__module__], value.__name__)
        elif _delegates(kind):
            return copyreg.__newobj__, (kind,), _state(value), None, None, _set_state  # type: ignore[attr-defined]
        if kind is logging.StreamHandler:
            state = {key: part for key, part in vars(value).items() if key != "lock"}
            return logging.StreamHandler, (), state, None, None, _set_state
        if isinstance(value, io.TextIOWrapper):
            # cloudpickle would send a copy of its contents
            raise TypeError("cannot pickle an open file")
        if isinstance(value, types.ModuleType) and kind is not types.ModuleType:
            return _reduce_module(value)
        if isinstance(value, torch.jit.ScriptFunction):
            return _reduce_script_function(value)
        return super().reducer_override(value)


def _reduce_cache(value: Any) -> Any:
    """A function under `functools.lru_cache`: by its name, or with an empty cache."""
    if value.__module__ in sys.modules and value.__module__ != "__main__":
        with contextlib.suppress(AttributeError):
            if operator.attrgetter(value.__qualname__)(sys.modules[value.__module__]) is value:
                return value.__reduce__()
    return _new_cache, (value.__wrapped__, value.cache_parameters())


def _new_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(value: functools.cached_property[Any]) -> Any:
    """Without the lock that it has up to Python 3.11."""
    return _new_cached_property, (value.func, value.attrname)


def _new_cached_property(function: Callable[..., Any], name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name  # of a class that is made anew nothing sets the names
    return made


def _reduce_number_limits(value: Any) -> Any:
    return type(value), (getattr(torch, value.dtype),)


Pickler.dispatch_table = collections.ChainMap(
    {
        functools._lru_cache_wrapper: _reduce_cache,
        functools.cached_property: _reduce_cached_property,
        torch.finfo: _reduce_number_limits,
        torch.iinfo: _reduce_number_limits,
    },
    cloudpickle.Pickler.dispatch_table,
)


def _reduce_module(value: types.ModuleType) -> Any:
    """A module of a class of its own, such as `torch.ops`: by its name, or as a part of another."""
    name = value.__name__
    if sys.modules.get(name) is value:
        return importlib.import_module, (name,)
    parent, _, last = name.rpartition(".")
    if getattr(sys.modules.get(parent), last, None) is value:
        return getattr, (sys.modules[parent], last)
    return NotImplemented


def _reduce_script_function(value: Any) -> Any:
    if any(argument.has_default_value() for argument in value.schema.arguments):
        return NotImplemented  # what torch saves of it has no defaults
    return _load_script_function, (value.save_to_buffer(),)


def _load_script_function(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))


def stream_name(value: Any) -> str | None:
    """The name of a standard stream, ``"stdout"``, ``"stderr"`` or ``"stdin"``; None for any other
    value.
    """
    for name in _STREAMS:
        known = (getattr(sys, name), getattr(sys, f"__{name}__"))
        if value is not None and any(value is stream for stream in known):
            return name
    # the original stream, where a notebook, a test or Ray has replaced it
    if type(value) is io.TextIOWrapper:
        return _NAMES.get(getattr(value, "name", None))
    return None


def _stream(name: str) -> Any:
    return getattr(sys, name)


@functools.lru_cache(maxsize=4096)
def _delegates(kind: Any) -> bool:
    """Whether unpickling calls an object's own `__getattr__` for `__setstate__`, at a time when the
    object has no attributes yet.
    """
    if kind.__new__ is not object.__new__ and not hasattr(kind.__new__, "__code__"):
        return False  # a list, a dict, or another type that keeps its contents in C
    inherited = object.__dict__
    no_hooks = all(getattr(kind, name, None) in (None, inherited.get(name)) for name in _HOOKS)
    return no_hooks and any("__getattr__" in vars(base) for base in kind.__mro__)


def _is_renamed(kind: Any) -> bool:
    """Whether a class is found in its module by ``__name__`` and not, as pickle seeks it, by
    ``__qualname__``. So are some that libraries made in C++, such as torch's ``SDPBackend``.
    """
    if kind.__name__ == kind.__qualname__.rpartition(".")[2]:
        return False
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def _state(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """An object's attributes and the values of its slots, read without its own `__getattr__`."""
    slots = {}
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        with contextlib.suppress(AttributeError):
            slots[name] = object.__getattribute__(value, name)
    try:
        return object.__getattribute__(value, "__dict__"), slots
    except AttributeError:
        return {}, slots


def _set_state(value: Any, state: Any) -> None:
    """Set an object's attributes without its own `__setattr__`."""
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    if attributes:
        object.__getattribute__(value, "__dict__").update(attributes)
    for name, part in slots.items():
        object.__setattr__(value, name, part)


_ALONE = b""
"""The skeleton of a value that is one tensor."""

_ROW = b"*"
"""The first byte of the skeleton of a tuple of tensors and Nones; a byte for each says which it is.
No pickle begins with this byte.
"""

_ROW_OF_ONE = _ROW + bytes([True])


class Known(Protocol):
    """Objects that sender and receiver have, by number or key."""

    def __getitem__(self, key: Any, /) -> Any: ...


def take_apart(
    value: Any,
    root: str,
    refs: dict[Any, int] | None = None,
    known: Mapping[int, Any] | None = None,
) -> tuple[bytes, list[Tensor]]:
    """A value's skeleton and its tensors.

    Args:
        value: The value.
        root: Its name in an error.
        refs: Takes the references of its `ChunkRef`s, with their numbers; None allows none.
        known: By their ids, the numbers or keys of objects that the receiver has: these stand for
            them.
    """
    kind: Any = type(value)
    if known and not known.keys().isdisjoint(map(id, value if kind is tuple else (value,))):
        kind = None
    if kind is Tensor:
        return _ALONE, [value]
    if kind is tuple and len(value) == 1 and type(value[0]) is Tensor:
        return _ROW_OF_ONE, [value[0]]
    if kind is tuple and is_row(value):
        present = bytes([part is not None for part in value])
        return _ROW + present, [part for part in value if part is not None]
    file = io.BytesIO()
    pickler = _ValuePickler(file, refs, known)
    try:
        pickler.dump(value)
    except Exception as error:
        raise unsendable(value, root, error, _picklable) from error
    return file.getvalue(), pickler.tensors


def load(parcel: Parcel, tensors: Sequence[Any], known: Known = ()) -> Any:
    """The value of a parcel with ``tensors``, which may be others than those that were unpacked,
    and with the objects ``known`` where numbers stand for them.
    """
    if parcel.skeleton == _ALONE:
        return tensors[0]
    if parcel.skeleton[:1] == _ROW:
        rest = iter(tensors)
        return tuple([next(rest) if present else None for present in parcel.skeleton[1:]])
    return _ValueUnpickler(io.BytesIO(parcel.skeleton), tensors, known).load()


def in_rows(parcels: Sequence[Parcel | None]) -> bool:
    """Whether all parcels hold one tensor, or all hold a tuple with tensors and Nones in the same
    places.
    """
    kinds = {parcel.skeleton if parcel is not None else None for parcel in parcels}
    first = parcels[0]
    return len(kinds) == 1 and first is not None and first.skeleton[:1] in (_ALONE, _ROW)


def is_row(value: tuple[Any, ...]) -> bool:
    """Whether a tuple holds only plain tensors, no two the same, and Nones."""
    tensors = [part for part in value if part is not None]
    return {*map(type, tensors)} <= {Tensor} and len({*map(id, tensors)}) == len(tensors)


class NotLoaded(Exception):
    """What was sent cannot be loaded; the reason is this exception's cause."""


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Tell an exception of loading, which runs code of the user's classes, from one of the
    module's.
    """
    try:
        yield
    except Exception as error:
        raise NotLoaded(what) from error


class _ValuePickler(Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        refs: dict[Any, int] | None,
        known: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self.index: dict[int, int] = {}
        self.refs = refs
        self.known = known

    def persistent_id(self, value: Any) -> Any:
        if self.known and id(value) in self.known:
            key = self.known[id(value)]
            return -1 - key if isinstance(key, int) else key
        if not isinstance(value, Tensor):
            return None
        index = self.index.setdefault(id(value), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(value)
        return index

    def reducer_override(self, value: Any) -> Any:
        if type(value) is ChunkRef and self.refs is not None:
            return ChunkRef, (self.refs.setdefault(value.ref, len(self.refs)), value.prepare)
        return super().reducer_override(value)


class _ValueUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Any], known: Known = ()) -> None:
        super().__init__(file)
        self.tensors = tensors
        self.known = known

    def persistent_load(self, index: Any) -> Any:
        if not isinstance(index, int):
            return self.known[index]
        return self.tensors[index] if index >= 0 else self.known[-1 - index]


_ADVICE = "Leave it out, make it where it is used, or give its class a __reduce__"


def _loadable(value: Any) -> bool:
    file = io.BytesIO()
    pickler = _ValuePickler(file, {})
    try:
        pickler.dump(value)
        _ValueUnpickler(io.BytesIO(file.getvalue()), pickler.tensors).load()
    except Exception:
        return False
    return True


def _picklable(value: Any) -> bool:
    try:
        _ValuePickler(io.BytesIO(), {}).dump(value)
    except Exception:
        return False
    return True


def unsendable(
    value: Any, path: str, error: Exception, picklable: Callable[[Any], bool]
) -> TransferError:
    """The error for a value that cannot be pickled, with the path to the innermost part that
    cannot.
    """
    path, kind = _innermost(value, path, picklable)
    return TransferError(
        f"{path} is a {kind}, which cannot be sent to another process: {error}. {_ADVICE}"
    )


def unloadable(value: Any, path: str, error: str) -> TransferError | None:
    """The error for a value that a replica could not load, with the path to the innermost part that
    cannot be loaded here either; None if all can be loaded here.
    """
    if _loadable(value):
        return None
    path, kind = _innermost(value, path, _loadable)
    return TransferError(
        f"{path} is a {kind}, which can be pickled, but not loaded in another process: {error}. "
        f"{_ADVICE}"
    )


def _innermost(value: Any, path: str, works: Callable[[Any], bool]) -> tuple[str, str]:
    """The path to the innermost part for which something does not work, and the name of its
    class.
    """
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        inner = next(((name, part) for name, part in _parts(value) if not works(part)), None)
        if inner is None:
            break
        path, value = path + inner[0], inner[1]
    return path.lstrip("."), f"{type(value).__module__}.{type(value).__qualname__}"


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        children = {**value._parameters, **value._buffers, **value._modules}
        attributes = dict(vars(value))
        for name in ("_parameters", "_buffers", "_modules"):
            attributes.pop(name, None)
        return [(f".{name}", part) for name, part in {**children, **attributes}.items()]
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if isinstance(value, (Tensor, type)) or not hasattr(value, "__dict__"):
        return []
    return [(f".{name}", part) for name, part in vars(value).items()]


DTYPES = {str(d)[6:]: d for d in vars(torch).values() if isinstance(d, torch.dtype)}

DTYPE_NAMES = {d: name for name, d in DTYPES.items()}

_PLAIN = (Tensor, nn.Parameter)

_FEW = 16
"""The most tensors that are tried as small ones; more would take long to look through."""

_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}


def write(
    tensor: Tensor, pieces: list[MemoryRange], offsets: list[int], end: int
) -> tuple[TensorSpec, int]:
    """Append a tensor's bytes to the pieces; returns its spec, and the offset of the next
    tensor.
    """
    if (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_meta
    ):
        return _write_composed(tensor, pieces, offsets, end)
    cls = None if type(tensor) in _PLAIN else type(tensor)
    if cls is not None and hasattr(tensor, "__tensor_flatten__"):
        return _saved(tensor), end
    flat = compact(tensor)
    if cls is not None:
        flat = flat.as_subclass(Tensor)
    spec = spec_of(flat, end)
    if cls is not None:
        spec = spec._replace(cls=pack_class(cls))
    if flat.numel():
        pieces.append(devices.piece(flat))
        offsets.append(end)
        end += aligned(flat.nbytes)
    return spec, end


def write_small(
    tensors: Sequence[Tensor], attachments: Attachments, requires_grad: bool
) -> tuple[tuple[TensorSpec, ...], bytes] | None:
    """Specs and bytes of a few small and plain tensors, in the fewest steps; None if a tensor is
    large or not plain.
    """
    specs, runs, end = [], [], 0
    if len(tensors) > _FEW:
        return None
    for tensor in tensors:
        if (
            type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or end + tensor.nbytes > attachments.link.inline
            or not devices.is_cpu(tensor.device)
            or tensor.is_quantized
        ):
            return None
        leaf = requires_grad and tensor.requires_grad
        if (
            tensor.is_conj()
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or not tensor.is_contiguous()
        ):
            tensor = compact(tensor)
        specs.append(
            TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), end, leaf)
        )
        size, until = tensor.nbytes, end + aligned(tensor.nbytes)
        runs += [ctypes.string_at(tensor.data_ptr(), size), bytes(until - end - size)]
        end = until
    attachments.size += end
    return tuple(specs), runs[0] if len(tensors) == 1 else b"".join(runs)


def read_small(parcel: Parcel) -> list[Tensor] | None:
    """The tensors of a parcel with its bytes in the message, in the fewest steps; None if a tensor
    is not plain.
    """
    begin, tensors = address_of(parcel.packet), []
    for spec in parcel.specs:
        if spec.layout != "strided" or spec.cls is not None:
            return None
        # The device is named, as wherever a tensor is made: the caller may have set a default.
        dtype = DTYPES[spec.dtype]
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=_CPU)
        ctypes.memmove(tensor.data_ptr(), begin + spec.offset, tensor.nbytes)
        tensors.append(tensor.requires_grad_() if spec.requires_grad else tensor)
    return tensors


class RowLayout(NamedTuple):
    """The layout of a row of plain tensors in a packet.

    Attributes:
        specs: The specs of the tensors.
        sizes: The size of each in bytes.
        offsets: The first byte of each.
        end: The size of the packet in bytes.
        together: How one operation copies them all; None if there is none.
    """

    specs: SpecRow
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int
    together: RowPlan | None


def write_row(
    tensors: Sequence[Tensor],
) -> tuple[RowLayout, list[MemoryRange], Sequence[int]] | None:
    """Layout, bytes and offsets of many plain tensors, such as a model's gradients; None if a
    tensor is not plain. On a GPU they are one run.

    The layout follows from shapes and dtypes alone and is cached, because each step has the same.
    """
    plain = {*map(type, tensors)} <= {*_PLAIN} and {*map(_layout, tensors)} == {torch.strided}
    if not plain or any(any(map(test, tensors)) for test in _SPECIAL):
        return None
    row = _row(tuple(map(_geometry, tensors)), tuple(map(Tensor.stride, tensors)))
    if row is None:
        return None
    places = {*map(_device, tensors)}
    if all(map(devices.is_cpu, places)):
        runs = map(MemoryRange, map(Tensor.data_ptr, tensors), row.sizes, tensors)
        return row, [*runs], row.offsets
    if row.together is None or len(places) > 1:
        return row, [*map(devices.piece, tensors)], row.offsets
    origin = devices.DeviceRow(tensors, row.together, row.end)
    return row, [MemoryRange(0, row.end, tensors, origin)], [0]


_CPU = torch.device("cpu")  # made once: parsing its name takes a tenth of `read_small`
_layout = attrgetter("layout")
_device = attrgetter("device")
_geometry = attrgetter("shape", "dtype")
_SPECIAL: tuple[Callable[[Tensor], bool], ...] = (
    *map(attrgetter, ("requires_grad", "is_nested", "is_quantized", "is_meta")),
    *(Tensor.is_conj, Tensor.is_neg, Tensor._is_zerotensor),
)
"""Tests that are all false for a tensor that is plain bytes and is in no graph."""


@functools.lru_cache(maxsize=64)
def _row(kinds: tuple[Any, ...], strides: tuple[tuple[int, ...], ...]) -> RowLayout | None:
    """The layout for some shapes, dtypes and strides; None if a tensor is empty or has gaps."""
    specs, sizes, end = [], [], 0
    for (shape, dtype), stride in zip(kinds, strides, strict=True):
        size = math.prod(shape) * dtype.itemsize
        if not size or not _is_run(shape, stride):
            return None
        specs.append(TensorSpec(DTYPE_NAMES[dtype], tuple(shape), stride, end))
        sizes.append(size)
        end += aligned(size)
    row, offsets = SpecRow(specs), tuple([spec.offset for spec in specs])
    together = row.plan if {spec.dtype for spec in specs} <= COPIED else None
    return RowLayout(row, tuple(sizes), offsets, end, together)


def _is_run(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor with elements is one run, in whatever order its dimensions lie."""
    step = 1
    for found, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and found != step:
            return False
        step *= size
    return True


def _write_composed(
    tensor: Tensor, pieces: list[MemoryRange], offsets: list[int], end: int
) -> tuple[TensorSpec, int]:
    layout, parts, extra = _components(tensor)
    if not parts:
        return _saved(tensor), end
    specs = []
    for part in parts:
        spec, end = write(part, pieces, offsets, end)
        specs.append(spec)
    shape = () if layout == "nested" else tuple(tensor.shape)
    spec = TensorSpec(
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=shape,
        stride=(),
        offset=end,
        layout=layout,
        parts=tuple(specs),
        extra=extra,
    )
    return spec, end


def _components(tensor: Tensor) -> tuple[str, list[Tensor], Any]:
    tensor = tensor.detach()
    if tensor.is_nested and tensor.numel():
        return "nested", list(tensor.unbind()), tensor.layout is torch.jagged
    if tensor.layout is torch.sparse_coo:
        return "sparse_coo", [tensor._indices(), tensor._values()], tensor.is_coalesced()
    if tensor.layout in _COMPRESSED:
        outer, inner = _COMPRESSED[tensor.layout]
        return str(tensor.layout)[6:], [outer(tensor), inner(tensor), tensor.values()], None
    return "saved", [], None


def _saved(tensor: Tensor) -> TensorSpec:
    """A spec that holds a tensor as `torch.save` writes it, for those without a simpler form
    (quantized tensors, wrapper subclasses).
    """
    file = io.BytesIO()
    torch.save(tensor.detach().clone(), file)  # a clone, so that the storage holds no other tensors
    return TensorSpec(DTYPE_NAMES[tensor.dtype], (), (), 0, layout="saved", extra=file.getvalue())


def rebuild(
    spec: TensorSpec, read: Callable[[TensorSpec, torch.dtype], Tensor], device: torch.device
) -> Tensor:
    """The tensor of a spec; ``read`` makes each strided part."""
    dtype = DTYPES[spec.dtype]
    if spec.layout == "strided":
        tensor = read(spec, dtype)
        return tensor if spec.cls is None else tensor.as_subclass(load_class(spec.cls))
    if spec.layout == "saved":
        saved: Tensor = torch.load(io.BytesIO(spec.extra), map_location=device, weights_only=False)
        return saved
    parts = [rebuild(part, read, device) for part in spec.parts]
    if spec.layout == "nested":
        return torch.nested.nested_tensor(
            parts, layout=torch.jagged if spec.extra else torch.strided, device=parts[0].device
        )
    if spec.layout == "sparse_coo":
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices,
            values,
            spec.shape,
            is_coalesced=spec.extra,
            check_invariants=False,
            device=values.device,
        )
    outer, inner, values = parts
    layout = getattr(torch, spec.layout)
    return torch.sparse_compressed_tensor(
        outer, inner, values, spec.shape, layout=layout, device=values.device
    )


def compact(tensor: Tensor) -> Tensor:
    """The tensor with its bytes in one run: itself, or a copy with the same order of strides."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor._is_zerotensor():  # which has no memory
        return tensor.clone()
    in_a_run = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if in_a_run else tensor.clone(memory_format=torch.preserve_format)


def spec_of(tensor: Tensor, offset: int = 0) -> TensorSpec:
    """The spec of a compact strided tensor."""
    return TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)


def pack_class(cls: type) -> bytes:
    """A tensor class as bytes for a spec, by cloudpickle. Messages are pickled without cloudpickle,
    for speed.
    """
    data: bytes = cloudpickle.dumps(cls)
    return data


@functools.lru_cache(maxsize=64)
def load_class(data: bytes) -> Any:
    """The class of a spec."""
    return pickle.loads(data)


def encode(
    value: Any,
    attachments: Attachments,
    root: str,
    requires_grad: bool = False,
    refs: dict[Any, int] | None = None,
    known: Mapping[int, Any] | None = None,
) -> tuple[Parcel, list[Tensor]]:
    """Make a parcel of ``value``; its tensors' bytes go into ``attachments``.

    Args:
        value: Any picklable value, with tensors anywhere in it.
        attachments: Where the bytes go.
        root: The name of ``value`` in an error about an object inside it.
        requires_grad: Whether tensors that require a gradient do so on the other side too.
        refs: Takes references to objects of Ray's, see `take_apart`; None allows none.
        known: Objects that the receiver has, see `take_apart`.

    Returns:
        The parcel, and the tensors in the order of its specs.
    """
    skeleton, tensors = take_apart(value, root, refs, known)
    if torch.autograd.forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    small = write_small(tensors, attachments, requires_grad)
    if small is not None:
        return Parcel(skeleton, *small), tensors
    plain = write_row(tensors)
    if plain is not None:
        layout, runs, starts = plain
        packet = attachments.send(runs, starts, layout.end)
        return Parcel(skeleton, layout.specs, packet), tensors
    pieces: list[MemoryRange] = []
    offsets: list[int] = []
    specs = []
    end = 0
    for tensor in tensors:
        spec, end = write(tensor, pieces, offsets, end)
        if requires_grad and tensor.requires_grad:
            spec = spec._replace(requires_grad=True)
        specs.append(spec)
    packet = attachments.send(pieces, offsets, end) if pieces else b""
    return Parcel(skeleton, tuple(specs), packet), tensors


def _refuse_tangents(tensors: Sequence[Tensor]) -> None:
    """Raise torch's own kind of error for derivatives that would be lost in silence."""
    if any(torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(
            "forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp) do not reach "
            "into replicas, nor into those of torch.nn.DataParallel: use reverse mode, such as "
            "torch.autograd.functional.jvp, or the module itself"
        )


def encode_again(parcel: Parcel, tensors: Sequence[Tensor], attachments: Attachments) -> Parcel:
    """The same parcel for another message, given its tensors, which have not changed."""
    pieces: list[MemoryRange] = []
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        _, end = write(tensor, pieces, offsets, end)
    return parcel._replace(packet=attachments.send(pieces, offsets, end) if pieces else b"")


def row(
    value: tuple[Tensor | None, ...], specs: Sequence[TensorSpec], packet: Attachment
) -> Parcel:
    """The parcel of a row of tensors from a packet that holds its bytes already."""
    return Parcel(take_apart(value, "")[0], tuple(specs), packet)


def tensors_in(value: Any, root: str, known: Mapping[int, Any] | None = None) -> list[Tensor]:
    """The tensors that `encode` would find, in its order."""
    return take_apart(value, root, known=known)[1]


def decode(
    parcel: Parcel, attachments: Attachments, device: torch.device
) -> tuple[Any, list[Tensor]]:
    """Rebuild a parcel's value on ``device``, in memory that the receiver may write to.

    Returns:
        The value, and its tensors in the order of the specs.
    """
    tensors = unpack(parcel, attachments, device)
    return load(parcel, tensors), tensors


def unpack(
    parcel: Parcel,
    attachments: Attachments,
    device: torch.device,
    rows: Sequence[int] | None = None,
) -> list[Tensor]:
    """The tensors of a parcel without the value around them: all, or those with the numbers
    ``rows``.
    """
    if rows is not None and isinstance(parcel.specs, SpecRow):
        parcel = parcel._replace(specs=parcel.specs.chosen(rows))
    elif rows is not None:
        parcel = parcel._replace(specs=tuple([parcel.specs[number] for number in rows]))
    if not parcel.specs:
        return []
    on_cpu = devices.is_cpu(device)
    if on_cpu and type(parcel.packet) is bytes:
        small = read_small(parcel)
        if small is not None:
            return small
    own = attachments.take(parcel.packet) if on_cpu else None
    plan = parcel.specs.plan if isinstance(parcel.specs, SpecRow) else None
    if plan is not None:
        if own is not None:
            return devices.row_in_place(own, plan)
        return devices.row_copied(attachments.open(parcel.packet), plan, device)
    if own is not None:
        read = devices.in_place(own)
    else:
        read = devices.reader(attachments.open(parcel.packet), device)
    tensors = [rebuild(spec, read, device) for spec in parcel.specs]
    for tensor, spec in zip(tensors, parcel.specs, strict=True):
        if spec.requires_grad:
            tensor.requires_grad_()
    return tensors
