"""Scatter and gather against upstream, row by row of the contract."""

import enum
import warnings
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from harness import same
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from raydp_parallel.batch import containers, gather, register_batch_type, scatter, scatter_kwargs
from raydp_parallel.batch.splitting import sizes, weighted_sizes

TWO = [0, 1]
LENGTHS = (3, 1, 4, 2, 5)

Pair = namedtuple("Pair", "x y")
Tuples, Lists = type("Tuples", (tuple,), {}), type("Lists", (list,), {})
Color = enum.Enum("Color", "RED")


class Labelled(dict):
    """A dict with a constructor that takes anything, and keeps none of it."""

    def __init__(self, label=None):
        super().__init__()
        self.label = label


class Named(dict):
    """A dict with a constructor that does not take items."""

    def __init__(self, name):
        super().__init__()
        self.label = name.lower()


@dataclass
class Sample:
    x: Any
    label: Any = "label"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    note: str = field(default="note", kw_only=True)


def numbers(*shape, requires_grad=False):
    return torch.arange(float(np.prod(shape))).view(shape).requires_grad_(requires_grad)


def packed(lengths):
    pieces = [numbers(size, 2) + 10 * size for size in lengths]
    return pack_sequence(pieces, enforce_sorted=False)


@torch.no_grad()
def test_S2_S3_chunks_are_plain_views():
    """Writing into a chunk writes into the caller's tensor. A Parameter's are no Parameters."""
    x = torch.nn.Parameter(torch.zeros(4, 2))
    for index, chunk in enumerate(scatter(x, TWO)):
        assert type(chunk) is torch.Tensor
        chunk.add_(index + 1)
    assert x[:, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("dim", [1, -2])
def test_S5_dim_out_of_range(dim):
    """A tensor without the dimension raises IndexError, as upstream, and its place is told."""
    inputs = (numbers(3, 4), {"lengths": numbers(3)})
    with pytest.raises(IndexError):
        oracle.scatter(inputs, TWO, dim)
    text = r"Dimension out of range.*inputs\[1\]\['lengths'\] has shape \(3,"
    with pytest.raises(IndexError, match=text):
        scatter(inputs, TWO, dim)


@pytest.mark.parametrize("sizes,count", [((6, 1), 2), ((5, 4), 4), ((9, 12), 4), ((2, 0), 3)])
def test_S6_K3_rows_are_never_lost(sizes, count):
    """Where upstream ends with the shortest."""
    first, second = sizes
    if all(sizes):
        chunks = oracle.scatter((numbers(first), numbers(second)), range(count))
        assert sum(len(x) for x, _ in chunks) < first or sum(len(y) for _, y in chunks) < second
    with pytest.raises(ValueError) as caught:
        scatter((numbers(first), {"x": [numbers(second)]}), range(count))
    assert f"inputs[0]: size {first}, " in str(caught.value)
    assert f"inputs[1]['x'][0]: size {second}, " in str(caught.value)
    with pytest.raises(ValueError, match=rf"kwargs\['x'\]: size {second}, "):
        scatter_kwargs((numbers(first),), {"x": numbers(second)}, range(count))


@pytest.mark.parametrize("value", [Named("N"), Labelled("n")])
def test_S7_dict_with_a_constructor_of_its_own(value):
    """A dict that cannot be made of items is copied and filled (#52597)."""
    value.update(x=numbers(4))
    for chunk, expected in zip(scatter(value, TWO), numbers(4).chunk(2), strict=True):
        assert type(chunk) is type(value) and chunk.label == "n"
        assert list(chunk) == ["x"] and torch.equal(chunk["x"], expected)
    assert len(value["x"]) == 4


@pytest.mark.parametrize(
    "leaf", [[], (), {}, None, "text", {1, 2}, np.arange(4), Color.RED, int, deque([1]), object()]
)
def test_S9_leaves_are_handed_on(leaf):
    """What holds no tensor is the same object in every chunk."""
    chunks = scatter([numbers(4), leaf], TWO)
    assert len(chunks) == 2 and all(chunk[1] is leaf for chunk in chunks)
    chunks = scatter(leaf, range(3))
    assert len(chunks) == 3 and all(chunk is leaf for chunk in chunks)


def test_S10_containers_are_new_leaves_are_shared():
    """Keys added in a chunk do not reach the caller, a leaf changed there does."""
    shared = object()
    value = {"x": numbers(4), "deep": {"leaf": shared}}
    first, second = scatter(value, TWO)
    first["new"] = first["deep"]["new"] = 1
    assert second.keys() == value.keys() and second["deep"].keys() == value["deep"].keys()
    assert first["deep"]["leaf"] is shared
    plain = {"n": 1}
    first, second = scatter([plain], TWO)
    assert first[0] == second[0] == plain and first[0] is not second[0] and first[0] is not plain


@pytest.mark.parametrize("call", [scatter, lambda x, ids: scatter_kwargs((x,), {}, ids)])
@pytest.mark.parametrize("value", [numbers(2), "text"])
def test_S14_no_device(call, value):
    """There has to be a device."""
    with pytest.raises(RuntimeError, match="Expected at least one device to scatter to"):
        call(value, [])


@pytest.mark.parametrize(
    "inputs,kwargs",
    [
        ((numbers(4),), None),
        ((numbers(4), 1), {"x": numbers(4), "y": [1, {"z": None}]}),
        ((), {"a": [], "b": {}, "c": (), "x": {"n": {}, "x": numbers(4)}}),
        ((None,), {}),
        ((), {}),
        ((), None),
    ],
)
def test_K1_K4_as_upstream(inputs, kwargs):
    """Both results have one entry per chunk; what is missing is padded; nothing gives nothing."""
    left, right = scatter_kwargs(inputs, kwargs, TWO)
    assert len(left) == len(right)
    same((left, right), oracle.scatter_kwargs(inputs, kwargs, TWO))


@pytest.mark.parametrize(
    "scalars,weights,expected", [("mean", None, 2.0), ("mean", [3, 1], 1.5), ("mean", [0, 0], 2.0)]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_G2_scalars_are_reduced_when_asked(scalars, weights, expected, dim):
    """One number without a warning, gradients included; so are counts."""
    parts = [torch.tensor(1.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)]
    how = {"scalars": scalars, "weights": weights}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = gather([{"loss": part} for part in parts], oracle.place, dim, **how)["loss"]
    assert out.dim() == 0 and out.item() == expected
    out.backward()
    assert sum(part.grad * part.detach() for part in parts).item() == pytest.approx(expected)
    counts = [torch.tensor(1), torch.tensor(2)]
    assert gather(counts, oracle.place, **how).item() == 1 + (expected - 1) / 2


def test_G2_wrong_options():
    """Unknown rules and weights that do not fit raise."""
    with pytest.raises(ValueError, match="scalars='max'"):
        gather([torch.tensor(1.0)], oracle.place, scalars="max")
    with pytest.raises(ValueError, match="3 weights for 1 chunks"):
        gather([torch.tensor(1.0)], oracle.place, scalars="mean", weights=[1, 2, 3])
    with pytest.raises(ValueError, match="nothing to gather"):
        gather([], oracle.place)


@pytest.mark.parametrize(
    "parts", [[None, torch.ones(1)], [torch.ones(1), None], [torch.ones(1), 3], [{}, []]]
)
def test_G3_replicas_have_to_agree(parts):
    """Where one replica returns another kind of value, the place and both kinds are named."""
    kinds = ["None" if part is None else f"a {type(part).__name__}" for part in parts]
    with pytest.raises(ValueError) as caught:
        gather([{"x": [part]} for part in parts], oracle.place)
    told = f"output['x'][0]: replica 0 returned {kinds[0]}, replica 1 {kinds[1]}"
    assert told in str(caught.value)
    assert gather([None, None], oracle.place) is None


@pytest.mark.parametrize(
    "keys,kind,text",
    [
        ([range(2), range(3)], ValueError, "2, 3"),
        (["a", "ab"], ValueError, "All dicts must have the same number of keys"),
        (["a", "b"], KeyError, "a"),
    ],
)
def test_G4_G6_structures_have_to_agree(keys, kind, text):
    """Never one replica's for all in silence."""
    kinds = dict.fromkeys if isinstance(keys[0], str) else list
    with pytest.raises(kind, match=text):
        gather([kinds(some) for some in keys], "cpu")


def test_G4_dicts():
    """Keys come in replica 0's order; subclasses stay what they are."""
    for make in (dict, OrderedDict):
        parts = [make(b=numbers(2), a=numbers(1)), make(a=numbers(1), b=numbers(2))]
        same(gather(parts, oracle.place), oracle.gather(parts, 0))
    out = gather([defaultdict(list, x=numbers(1)), defaultdict(list, x=numbers(1))], oracle.place)
    same(out, defaultdict(list, x=torch.zeros(2)))
    assert out["new"] == []
    same(gather([UserDict(x=numbers(1))] * 2, oracle.place), UserDict(x=torch.zeros(2)))
    assert dict(gather([Counter(a=1, b=0), Counter(a=2, b=0)], oracle.place)) == {
        "a": [1, 2],
        "b": [0, 0],
    }
    assert gather([Labelled("kept"), Labelled("kept")], oracle.place).label == "kept"


@pytest.mark.parametrize(
    "make", [list, tuple, Lists, Tuples, Pair._make, torch.return_types.max, deque, UserList]
)
def test_G5_sequences(make):
    """Sequences of all kinds come back as themselves, as upstream."""
    parts = [make([numbers(2), numbers(1)]), make([numbers(1), numbers(1)])]
    left, right = gather(parts, oracle.place), oracle.gather(parts, 0)
    assert type(left) is type(right) is type(parts[0])
    same(list(left), list(right))


def test_G5_sets():
    """A set of one tensor is gathered; several have no order, so that is an error and no guess."""
    (out,) = gather([{numbers(1)}, {numbers(2)}], oracle.place)
    assert out.tolist() == [0, 0, 1]
    assert type(gather([frozenset([numbers(1)])] * 2, oracle.place)) is frozenset
    with pytest.raises(ValueError, match="no order"):
        gather([{numbers(1), numbers(2)}] * 2, oracle.place)
    assert gather([{1, 2}, {3}], oracle.place) == [{1, 2}, {3}]


class Bag:
    """A class of a program's own that can be iterated over."""

    def __init__(self, parts=()):
        self.parts = list(parts)

    def __iter__(self):
        return iter(self.parts)


class Keyed(Bag):
    """Cannot be made of its parts alone."""

    def __init__(self, parts, *, key):
        super().__init__(parts)


def test_G5_iterable_classes():
    """They are made of their joined parts, as upstream, or are a list."""
    parts = [Bag([numbers(2), (numbers(1), None)]), Bag([numbers(1), (numbers(1), None)])]
    left, right = gather(parts, oracle.place), oracle.gather(parts, 0)
    assert type(left) is type(right) is Bag
    same(left.parts, right.parts)
    for plain in (Bag(), Bag([1, "text"]), Keyed([numbers(1)], key=3)):
        assert gather([plain, plain], oracle.place) == [plain, plain]
    with pytest.raises(ValueError, match="different numbers of items: 2, 1"):
        gather([parts[0], Bag([numbers(1)])], oracle.place)


@pytest.mark.parametrize(
    "leaf", [1, True, "text", b"bytes", np.float32(1), Color.RED, range(2), int, torch.Size([2, 3])]
)
def test_G7_leaves_become_a_list(leaf):
    """Whatever is neither tensor nor container comes back once per chunk."""
    assert gather([leaf, leaf], oracle.place) == [leaf, leaf]
    same(gather([(numbers(1), leaf)] * 2, oracle.place), (torch.zeros(2), [leaf, leaf]))


@pytest.mark.parametrize("make", [Sample, Frozen])
def test_G7_dataclass(make):
    """Dataclass instances are joined field by field (#41327)."""
    out = gather([make({"x": numbers(2)}), make({"x": numbers(1)})], oracle.place)
    assert type(out) is make and out.x["x"].tolist() == [0, 1, 0]
    rest = out.label if make is Sample else out.note
    assert rest == [rest[0]] * 2 and rest[0] in ("label", "note")
    assert gather([make, make], oracle.place) == [make, make]  # the class itself is a leaf


@pytest.mark.parametrize(
    "shapes,dim",
    [
        *(([(2, 3), (2, 4)], 0), ([(2, 3), (1, 3)], 1), ([(2, 3), (2,)], 0)),
        *(([(2,), (0,), (2, 1)], 0), ([(2, 3), (0,)], 0)),  # which torch.cat ignores
    ],
)
def test_G8_sizes_have_to_agree(shapes, dim):
    """Sizes other than along dim have to be equal; the first tensor that differs is named."""
    parts = [torch.ones(shape) for shape in shapes]
    with pytest.raises((RuntimeError, IndexError)):
        oracle.gather(parts, 0, dim)
    text = f"Input tensor at index {len(parts) - 1} has invalid shape"
    with pytest.raises(RuntimeError, match=text):
        gather(parts, oracle.place, dim)


def test_G10_minus_one_is_the_cpu():
    """-1 names the CPU with upstream's warning, 'cpu' without."""
    with pytest.warns(FutureWarning, match="Using -1 to represent CPU tensor is deprecated"):
        assert gather([numbers(1)], -1).device.type == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cpu", torch.device("cpu")):
            assert gather([numbers(1)], device).device.type == "cpu"


class Graphs:
    """A list of graphs in one object, as a class from elsewhere may be."""

    def __init__(self, items):
        self.items = list(items)


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch):
    """What a test registers ends with it."""
    monkeypatch.setattr(containers, "registered", {})


def split_graphs(value, chunks, dim):
    size = -(-len(value.items) // chunks)
    return [type(value)(value.items[at : at + size]) for at in range(0, len(value.items), size)]


def join_graphs(parts, target_device, dim):
    assert isinstance(target_device, torch.device)
    return type(parts[0])(item for part in parts for item in part.items)


class Speaking(Graphs):
    """A class that has the two methods."""

    __scatter__ = split_graphs
    __gather__ = staticmethod(join_graphs)


@pytest.mark.usefixtures("unregistered")
def test_X_registered_type():
    """A registered pair splits and joins, for subclasses too (#52597)."""
    value = Graphs("ab")
    assert scatter(value, TWO) == [value, value]
    register_batch_type(Graphs, scatter=split_graphs, gather=join_graphs)

    class Derived(Graphs):
        pass

    chunks = scatter([numbers(3), Graphs("abc"), Derived("abc")], TWO)
    found = [[part.items for part in chunk[1:]] for chunk in chunks]
    assert found == [[["a", "b"]] * 2, [["c"]] * 2]
    assert gather([chunk[1] for chunk in chunks], oracle.place).items == ["a", "b", "c"]
    with pytest.raises(TypeError, match="expected a class and two callables"):
        register_batch_type(Graphs, scatter=None, gather=join_graphs)


@pytest.mark.usefixtures("unregistered")
def test_X_custom_chunks_are_counted():
    """What a rule returns counts like a tensor's chunks, and may not exceed the devices."""
    with pytest.raises(ValueError, match=r"inputs\[0\]: size 1, 1 chunk; inputs\[1\]: 2 chunks\."):
        scatter([numbers(1), Speaking("ab")], TWO)
    text = r"inputs\[0\] was split by its own rule into 3 chunks, expected 1 to 2"
    register_batch_type(Graphs, scatter=lambda *_: [1, 2, 3], gather=join_graphs)
    with pytest.raises(ValueError, match=text):
        scatter([Graphs("abc")], TWO)


# --- any nested value ---

slow = [HealthCheck.too_slow]
steady = settings(
    derandomize=True, deadline=None, max_examples=80, database=None, suppress_health_check=slow
)

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)


def tensors(size, dim):
    """Tensors of one size along dim, with 1 to 3 dimensions."""

    def build(shape, dtype, seed):
        shape[dim] = size
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 5, shape, generator=generator).to(dtype)

    shapes = st.lists(st.integers(1, 3), min_size=dim + 1, max_size=3)
    return st.builds(build, shapes, st.sampled_from(DTYPES), st.integers(0, 99))


def nests(leaves, own=False):
    """Containers of containers of leaves; if asked for with those that upstream does not split."""

    def extend(inner):
        lists = st.lists(inner, min_size=1, max_size=3)
        dicts = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
        if own:
            defaults = dicts.map(lambda items: defaultdict(list, items))
            return st.one_of(lists, dicts.map(UserDict), defaults, st.builds(Sample, inner, inner))
        pairs = st.builds(Pair, inner, inner)
        return st.one_of(lists, lists.map(tuple), dicts, dicts.map(OrderedDict), pairs)

    return st.recursive(leaves, extend, max_leaves=6)


@st.composite
def batches(draw, own=False):
    """A nested value of at least one tensor, the dimension of its rows, and a number of devices."""
    dim, size = draw(st.sampled_from((0, 1))), draw(st.integers(1, 9))
    value = draw(nests(tensors(size, dim), own))
    return value, dim, draw(st.integers(1, 5)), size, own


@steady
@given(batches(own=True) | batches())
def test_gather_undoes_scatter_as_upstream(batch):
    """Splitting and joining gives the value back, class by class, in the same chunks."""
    value, dim, count, _, own = batch
    chunks = scatter(value, range(count), dim)
    same(gather(chunks, oracle.place, dim), value)
    if not own:
        expected = oracle.scatter(value, range(count), dim)
        same(list(chunks), list(expected))
        same(oracle.gather(expected, 0, dim), value)


@steady
@given(batches(own=True), nests(st.sampled_from([None, 1, "text", torch.tensor(2.0)])))
def test_arguments_are_split_together(batch, setting):
    """The number of chunks is the tensors', and every chunk has its rows, whatever comes along."""
    value, dim, count, size, _ = batch
    expected = [len(chunk) for chunk in torch.arange(size).chunk(count)]
    for args, kwargs in (((value,), {"setting": setting}), ((setting,), {"value": value})):
        chunks = [*zip(*scatter_kwargs(args, kwargs, range(count), dim), strict=True)]
        assert [next(sizes(chunk, dim), 0) for chunk in chunks] == expected
        found = [named.get("setting", *given) for given, named in chunks]
        same(found, [setting] * len(expected))


@steady
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 4), st.booleans())
@example([4, 6, 5, 8, 7, 5, 4] * 9, 2, False)
@example([4, 6, 5, 8, 7, 5, 4] * 9, 3, False)
def test_S12_packed_sequences(lengths, count, in_order):
    """As torch packs them, because a loss compares ``data`` with that of packed targets."""
    lengths = sorted(lengths, reverse=True) if in_order else lengths
    pieces = [torch.randn(size, 2, dtype=torch.double, requires_grad=True) for size in lengths]
    value = pack_sequence(pieces, enforce_sorted=in_order)
    joined = gather(scatter((value,), range(count)), oracle.place)[0]
    same(joined, value)
    joined.data.square().sum().backward()
    assert all(torch.allclose(piece.grad, 2 * piece.detach()) for piece in pieces)


@steady
@given(st.integers(0, 80), st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
@example(10, [1e300, 1e300])
@example(10, [1e-320, 1e-320])
def test_X2_sizes_of_any_weights(size, weights):
    """All rows, no empty chunk, none further than a row from its share where all have one."""
    found = weighted_sizes(size, len(weights), weights)
    assert sum(found) == size and len(found) == (min(size, len(weights)) or len(weights))
    assert not size or min(found) >= 1
    shares = [size * weight / sum(weights[: len(found)]) for weight in weights[: len(found)]]
    if min(shares) >= 1:
        assert all(abs(part - share) < 1 for part, share in zip(found, shares, strict=True))


@pytest.mark.usefixtures("unregistered")
def test_X2_all_values_of_a_call_are_split_alike():
    """Packed sequences and rules that take sizes, too; what has another size is refused."""

    def split(value, chunks, dim, sizes):
        rest = iter(value.items)
        return [Graphs(next(rest) for _ in range(size)) for size in sizes(len(value.items))]

    with pytest.raises(ValueError, match=r"inputs\[0\] is split by a rule of its class that takes"):
        scatter_kwargs((Speaking("ab"),), None, TWO, weights=(4, 1))
    register_batch_type(Graphs, scatter=split, gather=join_graphs)
    value = (numbers(5), packed(LENGTHS)), {"graphs": Graphs("abcde")}
    inputs, kwargs = scatter_kwargs(*value, TWO, weights=(4, 1))
    assert [next(sizes(chunk, 0)) for chunk in inputs] == [4, 1]
    assert [int(chunk[1].batch_sizes[0]) for chunk in inputs] == [4, 1]
    assert [len(chunk["graphs"].items) for chunk in kwargs] == [4, 1]
    assert [len(chunk.items) for chunk in scatter(Graphs("abcde"), TWO)] == [3, 2]
    with pytest.raises(ValueError, match=r"different sizes.*inputs\[0\]: size 8.*size 4"):
        scatter_kwargs((numbers(8), numbers(4)), None, TWO, weights=(4, 1))
