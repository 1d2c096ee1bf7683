"""Nested values to messages and back: a pickled skeleton, and the tensors' bytes beside it.

No raw tensor is ever pickled. Tensors are found wherever pickle reaches, in a user's own objects too, and each travels
once, so that a tensor that stands in two places of a value does so on the other side.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.errors import TransferError
from raydp_parallel.links import GIVEN, Found, Mail, Packet, Piece, aligned
from raydp_parallel.messages import Parcel, Site, TensorSpec

DTYPES = {str(d)[6:]: d for d in vars(torch).values() if isinstance(d, torch.dtype)}
DTYPE_NAMES = {d: name for name, d in DTYPES.items()}

_ALONE = b""
"""The skeleton of a value that is one tensor."""

_ROW = b"*"
"""Begins the skeleton of a tuple of tensors and Nones; a byte for each says which. No pickle begins so."""

_ROW_OF_ONE = _ROW + bytes([True])

_PLAIN = (Tensor, nn.Parameter)

_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}


class Plot(NamedTuple):
    """Where the tensors of an answer are to lie, if they are what is expected.

    Attributes:
        memory: The memory.
        specs: What is expected, and where each is to lie in it.
    """

    memory: Piece
    specs: tuple[TensorSpec, ...]


def plot(site: Site | None, mail: Mail) -> Plot | None:
    """Where the sender of a message wants its answer, None where this process cannot reach that."""
    packet = mail.find(site.packet) if site is not None else None
    if site is None or not isinstance(packet, Found) or packet.on_device:
        return None
    return Plot(packet.piece(), site.specs)


def encode(
    value: Any, mail: Mail, root: str, requires_grad: bool = False, plot: Plot | None = None
) -> tuple[Parcel, list[Tensor]]:
    """Make a parcel of ``value``; its tensors' bytes go into ``mail``.

    Args:
        value: Any picklable value, with tensors anywhere in it.
        mail: Where the bytes go.
        root: What to call ``value`` in an error about something inside it.
        requires_grad: Whether the other side gets tensors that require a gradient as such.
        plot: Where the bytes are wanted.

    Returns:
        The parcel, and the tensors in the order of its specs.
    """
    skeleton, tensors = _skeleton(value, root)
    pieces: list[Piece] = []
    offsets: list[int] = []
    specs = []
    end = 0
    for tensor in tensors:
        spec, end = write(tensor, pieces, offsets, end)
        specs.append(spec._replace(requires_grad=True) if requires_grad and tensor.requires_grad else spec)
    if plot is not None and alike(specs, plot.specs):
        specs = [spec._replace(offset=place.offset) for spec, place in zip(specs, plot.specs, strict=True)]
        packet = mail.lay(plot.memory, pieces, [spec.offset for spec in specs])
    else:
        packet = mail.send(pieces, offsets, end) if pieces else b""
    return Parcel(skeleton, tuple(specs), packet), tensors


def alike(some: Sequence[TensorSpec], others: Sequence[TensorSpec]) -> bool:
    """Whether two rows of tensors have the same bytes to lay, wherever they lie."""
    return [*map(_anywhere, some)] == [*map(_anywhere, others)]


def _anywhere(spec: TensorSpec) -> TensorSpec:
    return spec._replace(offset=0, requires_grad=False)


def encode_again(parcel: Parcel, tensors: Sequence[Tensor], mail: Mail) -> Parcel:
    """The same parcel for another message, given its tensors, which are as they were."""
    pieces: list[Piece] = []
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        _, end = write(tensor, pieces, offsets, end)
    return parcel._replace(packet=mail.send(pieces, offsets, end) if pieces else b"")


def tensors_in(value: Any, root: str) -> list[Tensor]:
    """The tensors that `encode` would find, in its order."""
    return _skeleton(value, root)[1]


def decode(parcel: Parcel, mail: Mail, device: torch.device) -> tuple[Any, list[Tensor]]:
    """Rebuild a parcel's value on ``device``, in memory that is the receiver's to write to.

    Returns:
        The value, and its tensors in the order of the specs.
    """
    tensors = unpack(parcel, mail, device)
    return load(parcel, tensors), tensors


def unpack(parcel: Parcel, mail: Mail, device: torch.device) -> list[Tensor]:
    """The tensors of a parcel alone, without the value around them."""
    if not parcel.specs:
        return []
    here = devices.is_cpu(device)
    if here and mail.given is not None and parcel.packet == GIVEN:
        tensors = mail.given.read(parcel.specs)
    else:
        own = mail.take(parcel.packet) if here else None
        read = devices.in_place(own) if own is not None else devices.reader(mail.open(parcel.packet), device)
        tensors = [_read(spec, read, device) for spec in parcel.specs]
    for tensor, spec in zip(tensors, parcel.specs, strict=True):
        if spec.requires_grad:
            tensor.requires_grad_()
    return tensors


def load(parcel: Parcel, tensors: Sequence[Any]) -> Any:
    """The value around ``tensors``, which may have been replaced by others since they were unpacked."""
    if parcel.skeleton == _ALONE:
        return tensors[0]
    if parcel.skeleton[:1] == _ROW:
        rest = iter(tensors)
        return tuple([next(rest) if present else None for present in parcel.skeleton[1:]])
    return _ValueUnpickler(io.BytesIO(parcel.skeleton), tensors).load()


def compact(tensor: Tensor) -> Tensor:
    """A strided tensor whose bytes are one run: itself, or a copy that keeps the order of its strides."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    in_a_run = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if in_a_run else tensor.clone(memory_format=torch.preserve_format)


def spec_of(tensor: Tensor, offset: int = 0) -> TensorSpec:
    """The spec of a compact strided tensor."""
    return TensorSpec(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)


def pack_class(cls: type) -> bytes:
    """A tensor class for a spec. Messages are pickled plainly, for speed; a class may need more than that."""
    data: bytes = cloudpickle.dumps(cls)
    return data


@functools.lru_cache(maxsize=64)
def load_class(data: bytes) -> Any:
    """The class of a spec."""
    return pickle.loads(data)


class _ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.index: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        index = self.index.setdefault(id(value), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(value)
        return index


class _ValueUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Any]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, index: int) -> Any:
        return self.tensors[index]


def _skeleton(value: Any, root: str) -> tuple[bytes, list[Tensor]]:
    if type(value) is Tensor:
        return _ALONE, [value]
    if type(value) is tuple and len(value) == 1 and type(value[0]) is Tensor:
        return _ROW_OF_ONE, [value[0]]
    if type(value) is tuple and is_row(value):
        return _ROW + bytes([part is not None for part in value]), [part for part in value if part is not None]
    file = io.BytesIO()
    pickler = _ValuePickler(file)
    try:
        pickler.dump(value)
    except Exception as error:
        raise unsendable(value, root, error, _picklable) from error
    return file.getvalue(), pickler.tensors


def row(value: tuple[Tensor | None, ...], specs: Sequence[TensorSpec], packet: Packet) -> Parcel:
    """The parcel of a row whose bytes lie in a packet already."""
    return Parcel(_skeleton(value, "")[0], tuple(specs), packet)


def is_row(value: tuple[Any, ...]) -> bool:
    """Whether a tuple holds plain tensors, each another, and Nones, and nothing else."""
    tensors = [part for part in value if part is not None]
    return {*map(type, tensors)} <= {Tensor} and len({*map(id, tensors)}) == len(tensors)


def _picklable(value: Any) -> bool:
    try:
        _ValuePickler(io.BytesIO()).dump(value)
    except Exception:
        return False
    return True


def unsendable(value: Any, path: str, error: Exception, picklable: Callable[[Any], bool]) -> TransferError:
    """The error for a value that pickle refused, with the path to the innermost part that it refuses."""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        inner = next(((name, part) for name, part in _parts(value) if not picklable(part)), None)
        if inner is None:
            break
        path, value = path + inner[0], inner[1]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return TransferError(
        f"{path.lstrip('.')} is a {kind}, which cannot be sent to another process: {error}. "
        "Leave it out, make it where it is used, or give its class a __reduce__"
    )


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        children = {**value._parameters, **value._buffers, **value._modules}
        plain = {k: v for k, v in vars(value).items() if k not in ("_parameters", "_buffers", "_modules")}
        return [(f".{name}", part) for name, part in {**children, **plain}.items()]
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if isinstance(value, (Tensor, type)) or not hasattr(value, "__dict__"):
        return []
    return [(f".{name}", part) for name, part in vars(value).items()]


def write(tensor: Tensor, pieces: list[Piece], offsets: list[int], end: int) -> tuple[TensorSpec, int]:
    """Append a tensor's bytes to the pieces; returns its spec, and where the next one's may begin."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return _write_composed(tensor, pieces, offsets, end)
    cls = None if type(tensor) in _PLAIN else type(tensor)
    if cls is not None and hasattr(tensor, "__tensor_flatten__"):
        return _saved(tensor), end
    flat = compact(tensor)
    if cls is not None:
        flat = flat.as_subclass(Tensor)
    spec = TensorSpec(
        DTYPE_NAMES[flat.dtype], tuple(flat.shape), flat.stride(), end, False, pack_class(cls) if cls else None
    )
    if flat.numel():
        pieces.append(devices.piece(flat))
        offsets.append(end)
        end += aligned(flat.nbytes)
    return spec, end


def _write_composed(tensor: Tensor, pieces: list[Piece], offsets: list[int], end: int) -> tuple[TensorSpec, int]:
    layout, parts, extra = _components(tensor)
    if not parts:
        return _saved(tensor), end
    specs = []
    for part in parts:
        spec, end = write(part, pieces, offsets, end)
        specs.append(spec)
    shape = () if layout == "nested" else tuple(tensor.shape)
    return TensorSpec(DTYPE_NAMES[tensor.dtype], shape, (), end, False, None, layout, tuple(specs), extra), end


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
    """What has no plainer form (quantized tensors, wrapper subclasses) travels as torch itself would save it."""
    file = io.BytesIO()
    torch.save(tensor.detach().clone(), file)  # not the whole storage that it may be a slice of
    return TensorSpec(DTYPE_NAMES[tensor.dtype], (), (), 0, layout="saved", extra=file.getvalue())


def _read(spec: TensorSpec, read: Callable[[TensorSpec, torch.dtype], Tensor], device: torch.device) -> Tensor:
    dtype = DTYPES[spec.dtype]
    if spec.layout == "strided":
        tensor = read(spec, dtype)
        return tensor if spec.cls is None else tensor.as_subclass(load_class(spec.cls))
    if spec.layout == "saved":
        saved: Tensor = torch.load(io.BytesIO(spec.extra), map_location=device, weights_only=False)
        return saved
    parts = [_read(part, read, device) for part in spec.parts]
    if spec.layout == "nested":
        return torch.nested.nested_tensor(
            parts, layout=torch.jagged if spec.extra else torch.strided, device=parts[0].device
        )
    if spec.layout == "sparse_coo":
        coalesced, place = spec.extra, parts[1].device
        return torch.sparse_coo_tensor(
            parts[0], parts[1], spec.shape, is_coalesced=coalesced, check_invariants=False, device=place
        )
    outer, inner, values = parts
    layout = getattr(torch, spec.layout)
    return torch.sparse_compressed_tensor(outer, inner, values, spec.shape, layout=layout, device=values.device)
