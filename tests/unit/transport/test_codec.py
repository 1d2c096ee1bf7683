"""Nested values to messages and back: every kind of tensor, what travels of it, and what an error
says.
"""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from raydp_parallel import TransferError
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink, ObjectStoreLink
from raydp_parallel.transport.messages import Parcel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[True, False], ids=["short way", "long way"])
def short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether what is small and plain goes the short way; all else goes the long one at any
    rate.
    """
    if not request.param:
        monkeypatch.setattr(InlineLink, "inline", 0)
        monkeypatch.setattr(codec, "read_small", lambda parcel: None)
    return bool(request.param)


def send(value: Any, requires_grad: bool = False) -> tuple[Parcel, Attachments]:
    """Encode, as a message that has crossed."""
    attachments = Attachments(InlineLink())
    parcel, _ = codec.encode(value, attachments, "", requires_grad)
    return pickle.loads(pickle.dumps(parcel)), attachments


def cross(value: Any, requires_grad: bool = False) -> Any:
    """A value as it arrives."""
    parcel, attachments = send(value, requires_grad)
    return codec.decode(parcel, Attachments(attachments.link, attachments.beside), CPU)[0]


def numbers(*shape: int) -> Tensor:
    """Different numbers."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


class Tagged(Tensor):
    """A plain subclass."""


class Own:
    """A user's object with tensors in it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.nested = {"deep": [tensor, (tensor,)]}


class Slotted:
    """A user's object without a dict."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


# --- dense tensors ---

INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64")
FLOATS = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)


@pytest.mark.parametrize("value", [(), (3,), (0, 2), (2, 3), (70,)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_both_ways_say_the_same(
    value: tuple[int, ...], count: int, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same specs, offsets, bytes and size, so that either end may go either way."""
    tensors = tuple(torch.randn(value, requires_grad=k == 1) for k in range(count))
    parcel, attachments = send(tensors, True)
    monkeypatch.setattr(InlineLink, "inline", 0 if short else 1 << 30)
    other, mail_of_other = send(tensors, True)
    assert parcel[:2] == other[:2] and attachments.size == mail_of_other.size
    assert parcel.packet[: len(other.packet)] == other.packet[: len(parcel.packet)]
    for tensor, found in zip(tensors, codec.decode(other, mail_of_other, CPU)[0], strict=True):
        assert torch.equal(tensor, found) and tensor.requires_grad == found.requires_grad


def test_large_ones_go_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they are more than the link takes into a message; of what was begun nothing
    is left.
    """
    monkeypatch.setattr(InlineLink, "inline", 100)
    tensors, attachments = (numbers(8), numbers(8)), Attachments(InlineLink())
    assert codec.write_small(tensors, attachments, False) is None and attachments.size == 0
    assert codec.write_small(tensors[:1], attachments, False) is not None and attachments.size == 64


def test_many_go_the_long_way() -> None:
    """Else a large model's small gradients would be copied for nothing before the first
    large one.
    """
    assert codec.write_small((numbers(1),) * 17, Attachments(InlineLink()), False) is None


def test_some_rows() -> None:
    """Of a parcel any tensors can be taken, in any order."""
    parcel, attachments = send((numbers(2), numbers(3), numbers(4)))
    for rows in ([0, 1, 2], [2, 0], [1], []):
        assert [len(t) for t in codec.unpack(parcel, attachments, CPU, rows)] == [
            row + 2 for row in rows
        ]


def test_zeros_without_memory() -> None:
    """Torch has tensors that only say that they are zero; forward-mode derivatives make such."""
    value = torch._efficientzerotensor((2, 3))
    assert value.data_ptr() == 0
    found = cross((value, value.t()))
    assert torch.equal(found[0], torch.zeros(2, 3)) and torch.equal(found[1], torch.zeros(3, 2))


@pytest.mark.parametrize("dtype", (*INTEGERS, *FLOATS))
def test_every_dtype(dtype: str) -> None:
    """Same dtype, same bytes."""
    tensor = numbers(3, 5).to(getattr(torch, dtype))
    found = cross(tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: numbers(3, 4),
    "transposed": lambda: numbers(3, 4).t(),
    "channels_last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: numbers(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: numbers(2, 3, 4).permute(2, 0, 1),
    "columns": lambda: numbers(4, 6)[:, 1:3],
    "every other": lambda: numbers(10)[::2],
    "flipped": lambda: numbers(10).flip(0),
    "expanded": lambda: numbers(3, 1).expand(3, 1000),
    "expanded from one": lambda: torch.tensor(7.0).expand(5, 5),
    "overlapping": lambda: numbers(10).as_strided((4, 3), (2, 1)),
    "diagonal": lambda: numbers(4, 4).diagonal(),
    "0-dim": lambda: torch.tensor(3.5),
    "one element": lambda: torch.ones(1, 1, 1),
    "empty": lambda: torch.empty(0),
    "empty with sizes": lambda: torch.empty(3, 0, 2, dtype=torch.int16),
    "slice of a batch": lambda: numbers(1000, 4)[500:502],
}


@pytest.mark.parametrize("kind", [*LAYOUTS])
def test_every_stride(kind: str) -> None:
    """Same values, in memory of its own."""
    tensor = LAYOUTS[kind]()
    found = cross(tensor)
    assert torch.equal(found, tensor)
    assert found.dtype == tensor.dtype
    assert found.untyped_storage().nbytes() <= max(tensor.nbytes, 1) + 64
    found.add_(1)  # a window of other memory, or an expanded one, would refuse or leak
    assert torch.equal(tensor, LAYOUTS[kind]())


@pytest.mark.parametrize(
    "kind", ("contiguous", "transposed", "channels_last", "channels_last_3d", "permuted")
)
def test_the_order_of_strides_is_kept(kind: str) -> None:
    """Dense tensors keep their strides, so kernels choose the same way."""
    tensor = LAYOUTS[kind]()
    assert cross(tensor).stride() == tensor.stride()


@pytest.mark.parametrize(
    "kind", ("columns", "every other", "expanded", "slice of a batch", "diagonal")
)
def test_only_the_bytes_that_show_travel(kind: str) -> None:
    """A slice of a big storage weighs what the slice weighs; pickle would send all of it."""
    tensor = LAYOUTS[kind]()
    parcel, attachments = send({"x": tensor})
    assert attachments.size <= tensor.numel() * tensor.element_size() + 64
    assert len(pickle.dumps(parcel)) < attachments.size + 600


def test_conjugate_and_negative_views() -> None:
    """Lazy bits of complex views are resolved on the way."""
    z = torch.complex(numbers(2, 3).double(), numbers(2, 3).double() + 1)
    for tensor in (z.conj(), z.conj().imag, z.conj().t(), torch._neg_view(z.real), z.conj()[:, 1]):
        found = cross(tensor)
        assert torch.equal(found, tensor.resolve_conj().resolve_neg())
        assert not found.is_conj()
        assert not found.is_neg()


def test_packets_are_aligned() -> None:
    """Each tensor starts where any dtype may, whatever stands before it."""
    values = [
        torch.ones(3, dtype=torch.bool),
        numbers(5).double(),
        torch.ones(1, dtype=torch.int8),
        numbers(3),
    ]
    parcel, _ = send(values)
    assert all(spec.offset % 64 == 0 for spec in parcel.specs)
    assert all(torch.equal(a, b) for a, b in zip(cross(values), values, strict=True))


def test_an_inference_tensor() -> None:
    """It has no version; what arrives is a normal tensor."""
    with torch.inference_mode():
        tensor = torch.ones(3)
    found = cross({"x": tensor})["x"]
    assert torch.equal(found, tensor)
    assert not found.is_inference()


# --- tensors that are not strided ---


def sparse(layout: str) -> Tensor:
    """A matrix in a sparse layout."""
    dense = torch.tensor([[0.0, 1.0, 0, 2.0], [0, 0, 0, 0], [3.0, 0, 4.0, 0], [0, 5.0, 0, 0]])
    sizes = {"bsr": {"blocksize": (2, 2)}, "bsc": {"blocksize": (2, 2)}}.get(layout, {})
    return dense.to_sparse() if layout == "coo" else getattr(dense, f"to_sparse_{layout}")(**sizes)


@pytest.mark.parametrize("layout", ("coo", "csr", "csc", "bsr", "bsc"))
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_layouts(layout: str) -> None:
    """Same layout, same entries."""
    tensor = sparse(layout)
    found = cross([tensor])[0]
    assert (found.layout, found.shape, found.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
    assert torch.equal(found.to_dense(), tensor.to_dense())


def test_sparse_coo_says_whether_it_is_coalesced() -> None:
    """An uncoalesced tensor arrives with its duplicates, a coalesced one needs no second sort."""
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (4,))
    found = cross(twice)
    assert not found.is_coalesced()
    assert found._nnz() == 3
    assert cross(twice.coalesce()).is_coalesced()


def test_sparse_with_dense_dims_and_empty() -> None:
    """Hybrid tensors and tensors without any entry."""
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), numbers(2, 3).float(), (4, 3))
    empty = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.long), torch.empty(0), (3, 3))
    for tensor in (hybrid, empty):
        assert torch.equal(cross(tensor).to_dense(), tensor.to_dense())
        assert cross(tensor).sparse_dim() == tensor.sparse_dim()


@pytest.mark.parametrize("layout", (torch.jagged, torch.strided))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested(layout: torch.layout) -> None:
    """Both layouts of nested tensors."""
    rows = [numbers(2, 3).float(), numbers(4, 3).float(), numbers(1, 3).float()]
    tensor = torch.nested.nested_tensor(rows, layout=layout)
    found = cross({"x": tensor})["x"]
    assert found.is_nested
    assert found.layout == layout
    assert all(torch.equal(a, b) for a, b in zip(found.unbind(), rows, strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantized() -> None:
    """Scale and zero point arrive; of a slice, the slice alone."""
    tensor = torch.quantize_per_tensor(torch.randn(100_000), 0.1, 3, torch.quint8)
    found = cross(tensor)
    assert torch.equal(found.int_repr(), tensor.int_repr())
    assert (found.q_scale(), found.q_zero_point()) == (tensor.q_scale(), tensor.q_zero_point())
    parcel, _ = send(tensor[:4])
    assert len(pickle.dumps(parcel)) < 10_000


def test_meta() -> None:
    """A meta tensor stays one, though what stands beside it has bytes."""
    found, beside = cross([torch.empty(2, 3, device="meta"), torch.ones(2)])
    assert (found.shape, beside.tolist()) == ((2, 3), [1.0, 1.0])


# --- classes, identity, flags ---


def test_parameters_arrive_as_tensors() -> None:
    """A value's Parameter is a plain tensor on the other side, as a chunk of it is under upstream
    (row S3).
    """
    found = cross({"p": nn.Parameter(torch.ones(3))})["p"]
    assert type(found) is Tensor
    assert not found.requires_grad


def test_subclasses_arrive_as_such() -> None:
    """Also where the class has to travel by value."""

    class Local(Tensor):
        pass

    for kind in (Tagged, Local):
        found = cross([torch.ones(2, 3).as_subclass(kind)])[0]
        assert type(found).__name__ == kind.__name__
        assert torch.equal(found.as_subclass(Tensor), torch.ones(2, 3))


@pytest.mark.xfail(strict=True, reason="attributes of tensors among inputs and outputs stay behind")
def test_attributes_of_a_subclass_arrive() -> None:
    """Such as the sizes that a box's tensor knows of its image."""
    tensor = torch.ones(2).as_subclass(Tagged)
    tensor.tag = "t"  # type: ignore[attr-defined]
    assert cross([tensor])[0].tag == "t"


def test_the_same_tensor_twice_is_one_tensor() -> None:
    """It travels once, and stands in both places."""
    tensor = torch.ones(1000)
    parcel, attachments = send({"a": tensor, "b": [tensor, Own(tensor)]})
    assert len(parcel.specs) == 1
    assert attachments.size < 2 * tensor.nbytes
    found = cross({"a": tensor, "b": [tensor, Own(tensor)]})
    assert found["a"] is found["b"][0] is found["b"][1].tensor is found["b"][1].nested["deep"][1][0]


@pytest.mark.parametrize(
    "row", ((0, 0), (0, 1, 0), (None, 0, None, 0), (None,), (), (0,), (0, None, 1))
)
def test_rows_of_tensors(row: tuple[int | None, ...]) -> None:
    """Tuples of tensors and Nones, repeated or not, as gradients are."""
    tensors = [torch.ones(3), torch.zeros(2, 2)]
    found = cross(tuple(None if i is None else tensors[i] for i in row))
    assert type(found) is tuple
    assert len(found) == len(row)
    for i, one in enumerate(row):
        assert (found[i] is None) == (one is None)
        if one is not None:
            assert torch.equal(found[i], tensors[one])
            assert all(found[i] is found[k] for k, other in enumerate(row) if other == one)


def test_views_of_one_storage_arrive_apart() -> None:
    """Two windows of one storage are two tensors; neither drags the storage along."""
    whole = numbers(10_000).float()
    _, attachments = send([whole[:10], whole[5:20]])
    assert attachments.size < 300
    first, second = cross([whole[:10], whole[5:20]])
    first.zero_()
    assert torch.equal(second, whole[5:20])


def test_tensors_inside_users_objects() -> None:
    """Wherever pickle reaches, none is pickled."""
    tensor = numbers(2000).float()
    parcel, _ = send([Own(tensor), Slotted(tensor), collections.deque([tensor])])
    assert len(parcel.skeleton) < 1000
    assert len(parcel.specs) == 1
    own, slotted, queue = cross([Own(tensor), Slotted(tensor), collections.deque([tensor])])
    assert torch.equal(own.nested["deep"][0], tensor)
    assert slotted.tensor is own.tensor is queue[0]


def test_a_module_is_a_value_too() -> None:
    """Its parameters' bytes lie beside the skeleton."""
    module = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))
    parcel, attachments = send([module])
    assert attachments.size >= sum(t.nbytes for t in module.state_dict().values())
    assert len(parcel.skeleton) < 10_000
    for name, tensor in cross([module])[0].state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])


class Point(NamedTuple):
    """Two values."""

    x: Any
    y: Any


def test_values_around_tensors_come_back_as_they_were() -> None:
    """Containers, namedtuples, plain values, None, functions by value."""
    value = {
        "p": Point(1, [None, "s", 2.5, {3}]),
        4: (b"b", 1 + 2j, range(3)),
        "f": lambda v: v + 1,
    }
    found = cross(value)
    assert {k: v for k, v in found.items() if k != "f"} == {
        k: v for k, v in value.items() if k != "f"
    }
    assert type(found["p"]) is Point
    assert found["f"](2) == 3
    assert cross(None) is None


@pytest.mark.parametrize("asked", (False, True))
def test_requires_grad_travels_where_it_is_asked_for(asked: bool) -> None:
    """As a leaf of the other side, whatever the tensor was here."""
    leaf = torch.ones(2, requires_grad=True)
    found = cross([leaf, leaf * 2, torch.ones(2), torch.tensor(1)], requires_grad=asked)
    assert [t.requires_grad for t in found] == [asked, asked, False, False]
    assert all(t.is_leaf and t.grad_fn is None for t in found)
    alone = cross(leaf * 2, requires_grad=asked)
    assert alone.requires_grad == asked


def test_requires_grad_of_sparse_tensors() -> None:
    """The flag belongs to the whole, not to a component."""
    found = cross([sparse("coo").requires_grad_()], requires_grad=True)[0]
    assert found.requires_grad
    assert found.is_leaf


def test_encode_returns_the_tensors_in_the_order_of_the_specs() -> None:
    """The caller pairs gradients with them."""
    a, b = torch.ones(1), torch.zeros(2)
    attachments = Attachments(InlineLink())
    parcel, tensors = codec.encode({"x": [a, b, a]}, attachments, "")
    assert tensors[0] is a
    assert tensors[1] is b
    assert [spec.shape for spec in parcel.specs] == [(1,), (2,)]


def test_load_puts_others_in_the_tensors_places() -> None:
    """A value may be rebuilt around tensors of the receiver's choice."""
    parcel, _ = send({"x": torch.ones(2), "y": [torch.ones(3)]})
    assert codec.load(parcel, ["first", "second"]) == {"x": "first", "y": ["second"]}


def test_a_value_without_tensors_has_no_packet() -> None:
    """Nothing is sent, and nothing is opened."""
    parcel, attachments = send({"a": 1})
    assert (parcel.specs, parcel.packet, attachments.size) == ((), b"", 0)
    assert codec.decode(parcel, Attachments(ObjectStoreLink()), CPU) == ({"a": 1}, [])


def test_every_decoding_has_memory_of_its_own() -> None:
    """One packet serves several receivers, and what one writes the next does not see."""
    parcel, attachments = send([torch.ones(3)])
    first = codec.decode(parcel, attachments, CPU)[1][0]
    first.zero_()
    assert codec.decode(parcel, attachments, CPU)[1][0].tolist() == [1, 1, 1]


def test_the_sender_may_write_on_at_once() -> None:
    """What was encoded is what the value was then."""
    tensor = torch.ones(3)
    parcel, attachments = send([tensor])
    tensor.zero_()
    assert codec.decode(parcel, attachments, CPU)[0][0].tolist() == [1, 1, 1]


# --- what cannot be sent ---


class Refuses:
    """Cannot be pickled, and says so with an error of its own."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


class Holder(nn.Module):
    """A module with something in it that cannot be pickled."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.child = Holder(depth - 1) if depth else None
        if not depth:
            self.lock = threading.Lock()


def refused(value: Any, root: str) -> TransferError:
    """The error for a value."""
    with pytest.raises(TransferError) as caught:
        codec.encode(value, Attachments(InlineLink()), root)
    return caught.value


LOCK = threading.Lock()
ARGUMENTS = collections.namedtuple("ARGUMENTS", "inputs kwargs")
PATHS: dict[str, Any] = {
    "inputs[0]": ARGUMENTS((LOCK,), {}),
    "inputs[0]['x']": ARGUMENTS(({"x": LOCK, "y": 1},), {}),
    "inputs[1][2]['deep'][0]": ARGUMENTS((1, [0, 0, {"deep": (LOCK,)}]), {}),
    "kwargs['mask']": ARGUMENTS((), {"a": torch.ones(1), "mask": LOCK}),
    "kwargs['o'].inner.lock": ARGUMENTS((), {"o": type("O", (), {})()}),
    "inputs[0].y": ARGUMENTS((Point(1, LOCK),), {}),
    "inputs[0][(1, 2)]": ARGUMENTS(({(1, 2): LOCK},), {}),
}
PATHS["kwargs['o'].inner.lock"].kwargs["o"].inner = type("I", (), {})()
PATHS["kwargs['o'].inner.lock"].kwargs["o"].inner.lock = LOCK


@pytest.mark.parametrize("path", [*PATHS])
def test_an_error_names_the_path(path: str) -> None:
    """Down to the innermost part that cannot be sent, with its type."""
    error = refused(PATHS[path], "")
    assert isinstance(error, TypeError)
    assert str(error).startswith(f"{path} is a _thread.lock")
    assert error.__cause__ is not None


def test_an_error_names_generators_and_modules_attributes() -> None:
    """A generator among the arguments; a lock deep inside a module."""
    assert str(refused(ARGUMENTS(((i for i in range(3)),), {}), "")).startswith(
        "inputs[0] is a builtins.generator"
    )
    assert str(refused(Holder(2), "module")).startswith("module.child.child.lock is a _thread.lock")


def test_an_error_carries_the_reason_that_pickle_gave() -> None:
    """An object that refuses with any exception is named."""
    error = refused([1, Refuses()], "output")
    assert str(error).startswith("output[1] is a ")
    assert "not me" in str(error)


def test_an_error_about_a_value_with_cycles_ends() -> None:
    """The search for the path does not go round for ever."""
    ring: list[Any] = [LOCK]
    ring.insert(0, ring)
    assert "cannot be sent" in str(refused(ring, "inputs"))


def test_the_error_can_be_pickled() -> None:
    """A replica raises it about outputs."""
    error = refused([LOCK], "output")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (TransferError, str(error))
    assert copy.copy(error).args == error.args


class Asks(type):
    """Makes classes that ask for what they have not got, as those of enums did in Python 3.11."""

    def __new__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> Any:
        return super().__new__(cls, name, bases, attributes)

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(name)


class Asked(metaclass=Asks):
    """Such a class."""


def test_a_class_whose_metaclass_asks_goes_by_its_name() -> None:
    """It is no object that delegates."""
    attachments = Attachments(InlineLink())
    parcel, _ = codec.encode({"kind": Asked}, attachments, "inputs")
    assert codec.decode(parcel, attachments, torch.device("cpu"))[0]["kind"] is Asked


def test_a_class_that_its_module_has_by_another_name_goes_by_that() -> None:
    """Pickle seeks torch's ``SDPBackend`` under its ``__qualname__``, ``_SDPBackend``."""
    backend = torch.nn.attention.SDPBackend
    attachments = Attachments(InlineLink())
    value = [backend, backend.MATH, functools.partial(torch.nn.attention.sdpa_kernel, backend.MATH)]
    parcel, _ = codec.encode(value, attachments, "inputs")
    kind, one, chosen = codec.decode(parcel, attachments, torch.device("cpu"))[0]
    assert kind is backend
    assert one == backend.MATH
    assert (chosen.func, chosen.args) == (torch.nn.attention.sdpa_kernel, (backend.MATH,))


def sent(value: Any) -> Any:
    """What arrives of a value."""
    attachments = Attachments(InlineLink())
    parcel, _ = codec.encode([value], attachments, "inputs")
    return codec.decode(parcel, attachments, torch.device("cpu"))[0][0]


@functools.lru_cache(maxsize=7)
def cached(number: int) -> int:
    """A function of a module, under a cache."""
    return number + 1


ops = torch.ops.aten


@pytest.mark.parametrize(
    "value",
    [torch.ops, torch.classes, ops, ops.relu, ops.relu.default, ops.add.Tensor, cached],
    ids=["ops", "classes", "aten", "relu", "relu.default", "add.Tensor", "cached"],
)
def test_what_a_process_has_once_goes_by_its_name(value: Any) -> None:
    """Operators of torch and where they are, and a cache that can be imported."""
    assert sent(value) is value
    assert sent(functools.partial(print, value)).args[0] is value


def test_a_cache_that_cannot_be_imported_arrives_empty() -> None:
    """With the function and the settings."""

    @functools.lru_cache(maxsize=3, typed=True)
    def inside(number: int) -> int:
        return number + 2

    inside(1)
    arrived = sent(inside)
    assert arrived is not inside
    assert arrived.cache_info().currsize == 0
    assert arrived.cache_parameters() == {"maxsize": 3, "typed": True}
    assert (arrived(1), arrived(1), arrived.cache_info().hits) == (3, 3, 1)


@pytest.mark.parametrize("limits", [torch.finfo(torch.bfloat16), torch.iinfo(torch.int16)])
def test_the_limits_of_a_dtype(limits: Any) -> None:
    """They are objects of torch's that refuse pickling."""
    arrived = sent(limits)
    assert (arrived.dtype, arrived.min, arrived.max) == (limits.dtype, limits.min, limits.max)


def doubled(x: Tensor) -> Tensor:
    """Is compiled to TorchScript."""
    return x * 2


def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    """Has a default, which torch does not save."""
    return x * factor


def test_functions_of_torchscript() -> None:
    """As torch saves them; one with a default would lose it, and is refused."""
    x = torch.ones(2)
    assert sent(torch.jit.script(doubled))(x).tolist() == [2.0, 2.0]
    assert sent(torch.jit.trace(doubled, x))(x).tolist() == [2.0, 2.0]
    with pytest.raises(TransferError, match="ScriptFunction cannot be pickled"):
        sent(torch.jit.script(scaled))


def calls_to_encode(count: int) -> int:
    """How many functions written in Python are called to encode a row of so many tensors, for the
    second time.
    """
    tensors = tuple(torch.full((3, 2), float(i)) for i in range(count))
    attachments, counts = Attachments(InlineLink()), [0]

    def note(frame: FrameType, event: str, _: object) -> None:
        counts[0] += event == "call" and frame.f_code.co_filename == codec.__file__

    codec.encode(tensors, attachments, "gradients")
    sys.setprofile(note)
    try:
        parcel, _ = codec.encode(tensors, attachments, "gradients")
    finally:
        sys.setprofile(None)
    assert all(map(torch.equal, codec.unpack(parcel, attachments, torch.device("cpu")), tensors))
    return counts[0]


def test_a_row_of_gradients_is_encoded_at_once() -> None:
    """A model's gradients are alike in each step: a tensor more takes no call more."""
    assert calls_to_encode(80) == calls_to_encode(20)


ODD = {
    "empty": torch.empty(0, 3),
    "expanded": torch.ones(1, 3).expand(2, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "leaf": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "channels last": torch.arange(24.0)
    .view(1, 2, 3, 4)
    .contiguous(memory_format=torch.channels_last),
    "half": torch.ones(3, dtype=torch.half),
    "zeros": torch._efficientzerotensor(3),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_tensor_among_many_plain_ones(odd: str) -> None:
    """It comes as it is, and so do the others, after rows of the same length that had none."""
    plain = [torch.full((3,), float(i)) for i in range(20)]
    for tensors in (plain, [*plain[:7], ODD[odd], *plain[8:]], plain):
        attachments = Attachments(InlineLink())
        parcel, _ = codec.encode(tuple(tensors), attachments, "gradients")
        for one, other in zip(
            codec.unpack(parcel, attachments, torch.device("cpu")), tensors, strict=True
        ):
            assert (one.layout, one.dtype, one.requires_grad) == (other.layout, other.dtype, False)
            assert torch.equal(one.to_dense(), other.detach().to_dense())
