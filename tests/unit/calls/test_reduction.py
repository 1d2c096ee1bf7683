"""Sums of the chunks' gradients: in the order of chunks, small and large, wherever their
bytes lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from raydp_parallel.calls.gradients import GradientShare, total
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import Attachments, InlineLink, Link, SharedLink, shared_link

CPU = torch.device("cpu")
LARGE = 20_000

LINKS: dict[str, Callable[[], Link]] = {
    "inline": InlineLink,
    "shared": lambda: SharedLink(Arena()),
    "auto": lambda: shared_link(Arena(), exposes=False, always=False),
}


@pytest.fixture(params=[*LINKS])
def link(request: pytest.FixtureRequest) -> Link:
    """What gradients travel by."""
    return LINKS[request.param]()


def share(
    link: Link, grads: Sequence[Tensor | None], leaves: Sequence[int | None] | None = None
) -> GradientShare:
    """A chunk's gradients on their way."""
    attachments = Attachments(link)
    parcel = codec.encode(tuple(grads), attachments, "gradients")[0]
    return GradientShare(parcel, attachments, range(len(grads)) if leaves is None else leaves)


def row(seed: int) -> list[Tensor | None]:
    """Gradients of many kinds: small and large, empty, a number, half, complex, with their strides
    turned round.
    """
    generator = torch.Generator().manual_seed(seed)
    grads = [
        torch.randn(shape, generator=generator)
        for shape in ((3, 5), (LARGE,), (0, 4), (), (7,), (6, 4), (2, 3))
    ]
    grads[4] = grads[4].half()
    grads[5] = grads[5].t()
    grads[6] = grads[6].to(torch.complex64)
    return [*grads]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sums_are_in_chunk_order_and_in_memory_of_their_own(link: Link, count: int) -> None:
    """To the bit, with the strides of the first, and none holds another's memory."""
    rows = [row(seed) for seed in range(count)]
    found = total([share(link, grads) for grads in rows], CPU, len(rows[0]))
    for number, tensor in enumerate(found):
        expected = rows[0][number].clone()  # type: ignore[union-attr]
        for grads in rows[1:]:
            expected = expected + grads[number]
        assert (
            tensor is not None and torch.equal(tensor, expected) and tensor.dtype == expected.dtype
        )
        assert (
            tensor.stride() == expected.stride()
            and tensor._base is None
            and not tensor.requires_grad
        )
        if tensor.nbytes >= 1 << 10 or count > 1:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    found[0].add_(1)  # type: ignore[union-attr]
    assert (
        len({tensor.data_ptr() for tensor in found if tensor is not None and tensor.nbytes})
        == len(found) - 1
    )


def test_who_has_no_gradient_adds_nothing(link: Link) -> None:
    """A leaf that some chunk, or all of them, did not use; one that is left out; one that stands
    twice in a row.
    """
    one, two, three = (torch.full((3,), float(value)) for value in (1, 2, 3))
    first = share(link, [one, None, None, two, three], [0, 1, 2, None, 0])
    second = share(link, [one, two, None, three], [0, 1, 2, 3])
    found = total([first, second], CPU, 5)
    assert [None if t is None else t.tolist() for t in found] == [
        [5.0] * 3,
        [2.0] * 3,
        None,
        [3.0] * 3,
        None,
    ]


def test_chunks_whose_gradients_are_not_alike(link: Link) -> None:
    """One sparse, one in other strides, one in another dtype: as torch adds them to the first."""
    dense, strided = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(4, 3).t()
    sparse = torch.eye(3, 4).to_sparse()
    found = total(
        [share(link, [dense, dense, dense]), share(link, [sparse, strided, dense.double()])], CPU, 3
    )
    for tensor, other in zip(found, (sparse.to_dense(), strided, dense), strict=True):
        assert (
            tensor is not None
            and tensor.dtype == torch.float32
            and torch.equal(tensor, dense + other)
        )
