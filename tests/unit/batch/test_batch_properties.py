"""What holds for any nested value: gather undoes scatter, and gradients are those of plain
slicing.
"""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_batch import assert_same
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from raydp_parallel.batch import gather, rows, scatter, scatter_kwargs

steady = settings(
    derandomize=True,
    deadline=None,
    max_examples=80,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

Point = namedtuple("Point", "x y")


@dataclass
class Record:
    x: Any
    y: Any


DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)


def tensors(size, dim):
    """Tensors of one size along dim, with 1 to 3 dimensions."""

    def build(shape, dtype, seed):
        shape[dim] = size
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 5, shape, generator=generator).to(dtype)

    shapes = st.lists(st.integers(1, 3), min_size=dim + 1, max_size=3)
    return st.builds(build, shapes, st.sampled_from(DTYPES), st.integers(0, 99))


def nests(leaves):
    """Containers of containers of leaves."""
    keys = st.sampled_from("abc")

    def extend(inner):
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
            st.dictionaries(keys, inner, min_size=1, max_size=3),
            st.dictionaries(keys, inner, min_size=1, max_size=3).map(OrderedDict),
            st.builds(Point, inner, inner),
        )

    return st.recursive(leaves, extend, max_leaves=6)


def own_nests(leaves):
    """The same, with the containers that upstream does not split."""

    def extend(inner):
        mappings = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            mappings.map(UserDict),
            mappings.map(lambda items: defaultdict(list, items)),
            st.builds(Record, inner, inner),
        )

    return st.recursive(leaves, extend, max_leaves=6)


@st.composite
def batches(draw, kind=nests, dims=(0, 1)):
    """A nested value of at least one tensor, the dimension of its rows, and a number of devices."""
    dim, size = draw(st.sampled_from(dims)), draw(st.integers(1, 9))
    value = draw(kind(tensors(size, dim)))
    return value, dim, draw(st.integers(1, 5)), size


@steady
@given(batches(own_nests) | batches())
def test_gather_undoes_scatter(batch):
    """Splitting and joining gives the value back, class by class."""
    value, dim, count, _ = batch
    assert_same(gather(scatter(value, range(count), dim), "cpu", dim), value)


@steady
@given(batches())
def test_scatter_and_gather_as_upstream(batch):
    """For tensors of one size both agree with upstream."""
    value, dim, count, _ = batch
    chunks = scatter(value, range(count), dim)
    expected = oracle.scatter(value, range(count), dim)
    assert_same(list(chunks), list(expected))
    assert_same(gather(chunks, "cpu", dim), oracle.gather(expected, 0, dim))


@steady
@given(
    batches(own_nests), nests(st.sampled_from([None, 1, "text", torch.tensor(2.0)])), st.booleans()
)
def test_arguments_are_split_together(batch, setting, by_keyword):
    """The number of chunks is the tensors', and every chunk has its rows, whatever comes along."""
    value, dim, count, size = batch
    args, kwargs = (
        ((value,), {"setting": setting}) if by_keyword else ((setting,), {"value": value})
    )
    inputs, keywords = scatter_kwargs(args, kwargs, range(count), dim)
    expected = [len(chunk) for chunk in torch.arange(size).chunk(count)]
    assert [
        rows(left, right, dim) for left, right in zip(inputs, keywords, strict=True)
    ] == expected
    assert_same(
        [
            right["setting"] if by_keyword else left[0]
            for left, right in zip(inputs, keywords, strict=True)
        ],
        [setting] * len(expected),
    )


@steady
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_chunk_counts_agree_or_raise(first, second, count):
    """Two sizes are split together exactly if they yield as many chunks."""
    values = (torch.ones(first), torch.ones(second))
    counts = {len(value.chunk(count)) for value in values}
    try:
        chunks = scatter(values, range(count))
    except ValueError:
        assert len(counts) == 2
    else:
        assert counts == {len(chunks)}
        assert [sum(len(chunk[i]) for chunk in chunks) for i in (0, 1)] == [first, second]


@steady
@given(
    st.integers(1, 7), st.integers(1, 4), st.sampled_from([0, 1, -1]), st.integers(0, 99), st.data()
)
def test_gradients_are_those_of_slicing(size, count, dim, seed, data):
    """First and second order, with any of the chunks in use."""
    torch.manual_seed(seed)
    x = torch.randn(size, size, dtype=torch.double, requires_grad=True)
    chunks = scatter(x, range(count), dim)
    slices = x.split([chunk.size(dim) for chunk in chunks], dim)
    used = data.draw(st.sets(st.integers(0, len(chunks) - 1), min_size=1))

    def derivatives(parts):
        whole = gather([parts[i].sin() * parts[i] for i in sorted(used)], "cpu", dim)
        (first,) = torch.autograd.grad(whole.pow(2).sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.pow(3).sum(), x)[0]

    for ours, plain in zip(derivatives(chunks), derivatives(slices), strict=True):
        assert torch.allclose(ours, plain)


@steady
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 4), st.booleans())
def test_packed_sequences(lengths, count, in_order):
    """Packed sequences of any lengths survive, with the gradient of plain copying."""
    lengths = sorted(lengths, reverse=True) if in_order else lengths
    pieces = [torch.randn(size, 2, dtype=torch.double, requires_grad=True) for size in lengths]
    value = pack_sequence(pieces, enforce_sorted=in_order)
    joined = gather(scatter((value,), range(count)), "cpu")[0]
    for left, right in zip(pad_packed_sequence(joined), pad_packed_sequence(value), strict=True):
        assert torch.equal(left, right)
    joined.data.square().sum().backward()
    assert all(torch.allclose(piece.grad, 2 * piece.detach()) for piece in pieces)


@steady
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any), st.integers(0, 99))
def test_weighted_mean_is_the_mean(sizes, seed):
    """Means of chunks weighted by their rows give the mean over all rows."""
    torch.manual_seed(seed)
    chunks = [torch.randn(size, dtype=torch.double) for size in sizes]
    means = [
        chunk.mean() if len(chunk) else torch.zeros((), dtype=torch.double) for chunk in chunks
    ]
    out = gather(means, "cpu", scalars="weighted_mean", weights=sizes)
    assert torch.allclose(out, torch.cat(chunks).mean())
