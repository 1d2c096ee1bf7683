"""Values without their tensors: pickled skeletons, in which a number stands for each tensor.

Tensors are found wherever pickle reaches, also in objects of the user's classes, and each once.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from raydp_parallel.errors import TransferError
from raydp_parallel.transport.chunk_ref import ChunkRef
from raydp_parallel.transport.codec.pickler import Pickler
from raydp_parallel.transport.messages import Parcel

_ALONE = b""
"""The skeleton of a value that is one tensor."""

_ROW = b"*"
"""The first byte of the skeleton of a tuple of tensors and Nones; a byte for each says which it is.
No pickle begins with this byte.
"""

_ROW_OF_ONE = _ROW + bytes([True])


def take_apart(
    value: Any, root: str, refs: dict[Any, int] | None = None
) -> tuple[bytes, list[Tensor]]:
    """A value's skeleton and its tensors.

    Args:
        value: The value.
        root: Its name in an error.
        refs: Takes the references of its `ChunkRef`s, with their numbers; None allows none.
    """
    if type(value) is Tensor:
        return _ALONE, [value]
    if type(value) is tuple and len(value) == 1 and type(value[0]) is Tensor:
        return _ROW_OF_ONE, [value[0]]
    if type(value) is tuple and is_row(value):
        present = bytes([part is not None for part in value])
        return _ROW + present, [part for part in value if part is not None]
    file = io.BytesIO()
    pickler = _ValuePickler(file, refs)
    try:
        pickler.dump(value)
    except Exception as error:
        raise unsendable(value, root, error, _picklable) from error
    return file.getvalue(), pickler.tensors


def load(parcel: Parcel, tensors: Sequence[Any]) -> Any:
    """The value of a parcel with ``tensors``, which may be others than those that were unpacked."""
    if parcel.skeleton == _ALONE:
        return tensors[0]
    if parcel.skeleton[:1] == _ROW:
        rest = iter(tensors)
        return tuple([next(rest) if present else None for present in parcel.skeleton[1:]])
    return _ValueUnpickler(io.BytesIO(parcel.skeleton), tensors).load()


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
    def __init__(self, file: io.BytesIO, refs: dict[Any, int] | None) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self.index: dict[int, int] = {}
        self.refs = refs

    def persistent_id(self, value: Any) -> int | None:
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
    def __init__(self, file: io.BytesIO, tensors: Sequence[Any]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, index: int) -> Any:
        return self.tensors[index]


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
