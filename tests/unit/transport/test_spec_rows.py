"""Specs of a row of tensors, which are the same object from step to step."""

from __future__ import annotations

import ctypes
import pickle

import pytest
import torch
from torch import Tensor

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange, SpecRow, TensorSpec
from raydp_parallel.transport import codec, message_bytes
from raydp_parallel.transport.links import Attachments, InlineLink, ObjectStoreLink
from raydp_parallel.transport.messages import Parcel, Reply

CPU = torch.device("cpu")


def tensors() -> tuple[Tensor, ...]:
    """More than are tried as small ones, of several dtypes, one with permuted axes."""
    rows = [torch.randn(3, i + 1) for i in range(20)]
    rows.append(torch.arange(7, dtype=torch.int64))
    rows.append(torch.randn(5, dtype=torch.float64))
    rows.append(torch.randn(()))
    return tuple(rows)


def received(link: InlineLink | ObjectStoreLink) -> tuple[Parcel, Attachments]:
    """Their parcel after a message brought it."""
    attachments = Attachments(link)
    parcel, _ = codec.encode(tensors(), attachments, "gradients")
    reply = message_bytes.unpack(message_bytes.pack(Reply(value=parcel)))
    return reply.value, Attachments(link, attachments.beside)


def test_the_same_specs_arrive_as_one_object() -> None:
    """What follows from them is then computed once."""
    (one, _), (other, _) = received(InlineLink()), received(InlineLink())
    assert type(one.specs) is SpecRow
    assert one.specs is other.specs
    assert one.specs.plan is other.specs.plan is not None


@pytest.mark.parametrize("link", [InlineLink(), ObjectStoreLink()], ids=["inline", "store"])
def test_tensors_read_by_a_plan_are_those_read_one_by_one(
    link: InlineLink | ObjectStoreLink,
) -> None:
    """All of them, and some in another order; each in memory of its own."""
    torch.manual_seed(0)
    parcel, attachments = received(link)
    singly = parcel._replace(specs=tuple(parcel.specs))
    for rows in (None, [5, 3, 20], [*range(23)]):
        found = codec.unpack(parcel, attachments, CPU, rows)
        expected = codec.unpack(singly, attachments, CPU, rows)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
            assert one.untyped_storage().nbytes() == one.nbytes
            assert one.storage_offset() == 0


def test_tensors_in_place_share_the_memory_and_keep_it_alive() -> None:
    """Each has a storage of its own over its bytes."""
    given = tensors()
    layout, pieces, _ = codec.write_row(given) or pytest.fail("a row")
    memory = bytearray(layout.end)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for piece, offset in zip(pieces, layout.offsets, strict=True):
        ctypes.memmove(address + offset, piece.address, piece.size)
    plan = layout.specs.plan
    assert plan is not None
    source = MemoryRange(address, layout.end, memory)
    found = devices.row_in_place(source, plan)
    windows = devices.row_windows(source, plan, CPU)
    del source
    for one, window, other in zip(found, windows, given, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(window, other)
        assert one.untyped_storage().nbytes() == other.nbytes
        one.add_(1)
        assert torch.equal(window, one)


SPEC = TensorSpec("float32", (2, 3), (3, 1), 0)


@pytest.mark.parametrize(
    "odd",
    [
        SPEC._replace(requires_grad=True),
        SPEC._replace(cls=b"class"),
        SPEC._replace(layout="sparse_coo"),
        SPEC._replace(shape=(0, 3)),
        SPEC._replace(offset=2),
    ],
    ids=["leaf", "class", "sparse", "empty", "unaligned"],
)
def test_a_row_with_an_odd_tensor_has_no_plan(odd: TensorSpec) -> None:
    """It is read one by one."""
    assert SpecRow([SPEC]).plan is not None
    assert SpecRow([SPEC, odd]).plan is None
    assert SpecRow([]).plan is None


def test_parts_of_a_row_are_kept_and_few() -> None:
    """The same part is the same object; the whole is the row itself."""
    row = SpecRow([SPEC._replace(offset=24 * i) for i in range(20)])
    assert row.chosen(range(20)) is row
    assert row.chosen([3, 1]) is row.chosen((3, 1))
    assert row.chosen([3, 1]) == (row[3], row[1])
    for i in range(20):
        assert row.chosen([i]) == (row[i],)
    assert len(row._parts) <= 4


def test_a_row_is_pickled_as_its_specs() -> None:
    """What was computed stays behind."""
    row = SpecRow([SPEC])
    assert row.plan is not None
    again = pickle.loads(pickle.dumps(row))
    assert type(again) is SpecRow
    assert again == row
    assert "plan" not in vars(again)
