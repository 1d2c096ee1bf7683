"""Scatter and gather against upstream, row by row of the contract; where we differ, the test says
what holds.
"""

import enum
import warnings
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from harness import cycles
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

from raydp_parallel.batch import gather, register_batch_type, rows, scatter, scatter_kwargs

Pair = namedtuple("Pair", "x y")
Nothing = namedtuple("Nothing", "")

SCALAR_WARNING = (
    "Was asked to gather along dimension 0, but all input tensors were scalars; "
    "will instead unsqueeze and return a vector."
)


class Tuples(tuple):
    pass


class Lists(list):
    pass


class Marked(torch.Tensor):
    pass


class Named(dict):
    """A dict with a constructor that does not take items."""

    def __init__(self, name):
        super().__init__()
        self.name = name.lower()


class Labelled(dict):
    """A dict with a constructor that takes anything, and keeps none of it."""

    def __init__(self, label=None):
        super().__init__()
        self.label = label


@dataclass
class Sample:
    x: Any
    label: Any = "label"


@dataclass(frozen=True)
class Frozen:
    x: Any
    note: str = field(default="note", kw_only=True)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


@dataclass
class Other:
    x: Any


class Color(enum.Enum):
    RED = 1


def devices(count):
    return list(range(count))


def numbers(*shape, **options):
    size = int(np.prod(shape))
    return (
        torch.arange(float(size))
        .reshape(shape)
        .clone()
        .requires_grad_(options.pop("requires_grad", False))
    )


def assert_same(left, right):
    """Equal values of equal classes, at any depth."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    elif isinstance(left, (dict, UserDict)):
        assert list(left) == list(right)
        assert_same(list(left.values()), list(right.values()))
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif hasattr(left, "__dataclass_fields__"):
        for name in left.__dataclass_fields__:
            assert_same(getattr(left, name), getattr(right, name))
    else:
        assert left == right


# --- scatter ---


@pytest.mark.parametrize(
    "size,count", [(5, 4), (6, 4), (3, 4), (1, 2), (8, 2), (7, 3), (4, 1), (0, 3)]
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_S1_chunk_sizes(size, count, dim):
    """A tensor is cut as torch.chunk cuts it, into a tuple, as upstream."""
    x = numbers(size, 3) if dim == 0 else numbers(3, size)
    chunks = scatter(x, devices(count), dim)
    assert_same(chunks, tuple(oracle.scatter(x, devices(count), dim)))
    assert_same(chunks, x.chunk(count, dim))


def test_S1_containers_give_a_list():
    """A tensor gives a tuple of chunks, a container a list."""
    x = numbers(5, 2)
    assert type(scatter(x, devices(2))) is tuple
    assert_same(scatter({"x": x}, devices(4)), oracle.scatter({"x": x}, devices(4)))


def test_S2_chunks_are_views():
    """No chunk is copied: writing into any of them writes into the caller's tensor."""
    x = torch.zeros(4, 2)
    for index, chunk in enumerate(scatter(x, devices(2))):
        chunk.add_(index + 1)
    assert x[:, 0].tolist() == [1, 1, 2, 2]


def test_S2_writing_into_a_chunk_that_requires_grad_raises():
    """As for upstream's chunk on the tensor's own device."""
    chunk = scatter(numbers(4, 2, requires_grad=True), devices(2))[0]
    with pytest.raises(RuntimeError, match="view"):
        chunk.add_(1)


def test_S3_chunks_belong_to_the_graph():
    """A chunk is made by Scatter; a Parameter's chunk is a plain tensor."""
    for x in (numbers(4, 2, requires_grad=True), torch.nn.Parameter(numbers(4, 2))):
        for chunk in scatter(x, devices(2)):
            assert (
                chunk.grad_fn.name() == "ScatterBackward"
                and type(chunk) is torch.Tensor
                and not chunk.is_leaf
            )
    assert not scatter(numbers(4), devices(2))[0].requires_grad


def test_S3_subclass_and_layout_are_kept():
    """A tensor's subclass stays, and so does channels_last."""
    assert all(
        type(chunk) is Marked for chunk in scatter(numbers(4, 2).as_subclass(Marked), devices(2))
    )
    x = numbers(4, 3, 5, 2).contiguous(memory_format=torch.channels_last)
    assert all(
        chunk.is_contiguous(memory_format=torch.channels_last) for chunk in scatter(x, devices(2))
    )


def test_S4_scalar_tensors_go_to_every_chunk():
    """A 0-dim tensor is handed to all chunks and collects the gradients of all."""
    scale = torch.tensor(2.0, requires_grad=True)
    chunks = scatter((numbers(3), scale), devices(2))
    assert [chunk[1] is scale for chunk in chunks] == [True, True]
    sum((x * s).sum() for x, s in chunks).backward()
    assert scale.grad == 3
    assert scatter(scale, devices(2)) == (scale, scale)


def test_S4_scalar_tensors_do_not_count():
    """One row and a 0-dim tensor on four devices are one chunk."""
    assert len(scatter((numbers(1), torch.tensor(1.0)), devices(4))) == 1
    assert len(scatter([torch.tensor(1.0)], devices(4))) == 4


@pytest.mark.parametrize("dim", [1, -2])
def test_S5_dim_out_of_range(dim):
    """A tensor without the dimension raises IndexError, as upstream, and its place is told."""
    inputs = (numbers(3, 4), {"lengths": numbers(3)})
    with pytest.raises(IndexError):
        oracle.scatter(inputs, devices(2), dim)
    with pytest.raises(IndexError, match=r"Dimension out of range.*inputs\[1\]\['lengths'\]"):
        scatter(inputs, devices(2), dim)


@pytest.mark.parametrize("sizes,count", [((6, 1), 2), ((5, 4), 4), ((9, 12), 4), ((2, 0), 3)])
def test_S6_rows_are_never_lost(sizes, count):
    """Tensors that yield different numbers of chunks raise, where upstream ends with the
    shortest.
    """
    first, second = sizes
    if all(sizes):
        chunks = oracle.scatter((numbers(first), numbers(second)), devices(count))
        assert sum(len(x) for x, _ in chunks) < first or sum(len(y) for _, y in chunks) < second
    with pytest.raises(ValueError) as caught:
        scatter((numbers(first), {"x": [numbers(second)]}), devices(count))
    assert f"inputs[0]: size {first}, " in str(caught.value)
    assert f"inputs[1]['x'][0]: size {second}, " in str(caught.value)


def test_S6_equal_counts_of_different_sizes():
    """Sizes may differ as long as every tensor yields as many chunks."""
    values = (numbers(6), numbers(5), numbers(3, 2))
    assert_same(scatter(values, devices(3)), oracle.scatter(values, devices(3)))


def test_S6_what_is_no_tensor_is_not_counted():
    """One row on two devices is one chunk, whatever else comes along."""
    assert_same(
        scatter([numbers(1), "a", [], {"k": 1}], devices(2)), [[numbers(1), "a", [], {"k": 1}]]
    )


def test_S7_sequences_become_plain():
    """Subclasses of list and tuple become list and tuple, as upstream."""
    for value in (Lists([numbers(4), 1]), Tuples([numbers(4), 1]), torch.Size([2, 3])):
        assert_same(scatter(value, devices(2)), oracle.scatter(value, devices(2)))
    assert type(scatter(Lists([numbers(4)]), devices(2))[0]) is list


def test_S7_ordered_dict():
    """Order and class are kept."""
    value = OrderedDict(b=numbers(4), a=numbers(4))
    assert_same(scatter(value, devices(2)), oracle.scatter(value, devices(2)))


def test_S7_defaultdict():
    """The factory is kept, where upstream raises TypeError."""
    with pytest.raises(TypeError):
        oracle.scatter(defaultdict(list, x=numbers(4)), devices(2))
    first, second = scatter(defaultdict(list, x=numbers(4)), devices(2))
    assert_same(second, defaultdict(list, x=torch.tensor([2.0, 3.0])))
    assert first["new"] == [] and "new" not in second


def test_S7_counter():
    """A Counter stays one, where upstream counts the items."""
    assert oracle.scatter(Counter(a=2), devices(2)) != [Counter(a=2)] * 2
    assert_same(scatter(Counter(a=2), devices(2)), [Counter(a=2)] * 2)


def test_S7_dict_with_a_constructor_of_its_own():
    """A dict that cannot be made of items is copied and filled (#52597)."""
    for value, name in ((Named("N"), "name"), (Labelled("n"), "label")):
        value.update(x=numbers(4))
        for chunk, expected in zip(scatter(value, devices(2)), numbers(4).chunk(2), strict=True):
            assert type(chunk) is type(value) and getattr(chunk, name) == "n"
            assert list(chunk) == ["x"] and torch.equal(chunk["x"], expected)
        assert len(value["x"]) == 4


def test_S8_namedtuple():
    """A namedtuple stays one."""
    value = Pair(numbers(4), "y")
    assert_same(scatter(value, devices(2)), oracle.scatter(value, devices(2)))
    assert type(scatter(value, devices(2))[1]) is Pair


def test_S8_namedtuple_without_fields():
    """It goes to every chunk; upstream makes no chunk at all of it, and of all that is
    beside it.
    """
    assert oracle.scatter((numbers(4), Nothing()), devices(2)) == []
    assert_same(
        scatter((numbers(4), Nothing()), devices(2)),
        [(part, Nothing()) for part in numbers(4).chunk(2)],
    )


@pytest.mark.parametrize(
    "leaf",
    [
        [],
        (),
        {},
        None,
        "text",
        b"bytes",
        3,
        2.5,
        {1, 2},
        np.arange(4),
        Color.RED,
        int,
        deque([1]),
        object(),
    ],
)
def test_S9_leaves_are_handed_on(leaf):
    """What holds no tensor is the same object in every chunk."""
    chunks = scatter([numbers(4), leaf], devices(2))
    assert len(chunks) == 2 and all(chunk[1] is leaf for chunk in chunks)
    assert all(chunk is leaf for chunk in scatter(leaf, devices(3)))
    assert len(scatter(leaf, devices(3))) == 3


def test_S9_user_dict():
    """A UserDict is split like a dict, and keeps its other attributes."""
    value = UserDict(x=numbers(4), n=1)
    value.name = "kept"
    chunks = scatter(value, devices(2))
    assert_same(chunks, [UserDict(x=part, n=1) for part in numbers(4).chunk(2)])
    assert all(chunk.name == "kept" for chunk in chunks) and len(value["x"]) == 4


def test_S9_batch_encoding():
    """What a transformers tokenizer returns is split."""
    transformers = pytest.importorskip("transformers")
    value = transformers.BatchEncoding(
        {"input_ids": torch.arange(6).reshape(3, 2), "attention_mask": torch.ones(3, 2)}
    )
    chunks = scatter_kwargs((), {"batch": value}, devices(2))[1]
    assert [type(chunk["batch"]) for chunk in chunks] == [transformers.BatchEncoding] * 2
    assert [chunk["batch"]["input_ids"].tolist() for chunk in chunks] == [
        [[0, 1], [2, 3]],
        [[4, 5]],
    ]
    assert_same(gather([chunk["batch"] for chunk in chunks], "cpu"), value)


@pytest.mark.parametrize("make", [Sample, Frozen, Slotted])
def test_S9_dataclass(make):
    """Dataclass instances are split field by field, frozen and slotted ones too."""
    value = make({"deep": numbers(4)})
    assert_same(scatter(value, devices(2)), [make({"deep": part}) for part in numbers(4).chunk(2)])
    assert len(value.x["deep"]) == 4


def test_S9_dataclass_with_a_field_not_set():
    """A field that has no value yet has none in the chunks."""

    @dataclass
    class Late:
        x: Any
        y: Any = field(init=False)

    chunks = scatter(Late(numbers(4)), devices(2))
    assert [len(chunk.x) for chunk in chunks] == [2, 2] and not hasattr(chunks[0], "y")


def test_S9_objects_without_tensors_are_not_copied():
    """A dataclass of settings, or a UserDict of them, is the same object in every chunk."""
    for value in (Sample(x=[1, 2]), UserDict(a=1)):
        assert all(chunk[1] is value for chunk in scatter([numbers(4), value], devices(2)))


def test_S9_model_output():
    """HF's ModelOutput, a dict and a dataclass in one, is split like a dict."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.SequenceClassifierOutput(logits=numbers(4, 2))
    chunks = scatter(value, devices(2))
    assert all(type(chunk) is outputs.SequenceClassifierOutput for chunk in chunks)
    assert torch.equal(chunks[1].logits, numbers(4, 2)[2:]) and chunks[1].loss is None


def test_S10_containers_are_new_leaves_are_shared():
    """Keys added in a chunk do not reach the caller, a leaf changed there does."""
    shared = object()
    value = {"x": numbers(4), "deep": {"leaf": shared}}
    first, second = scatter(value, devices(2))
    first["new"] = first["deep"]["new"] = 1
    assert second.keys() == value.keys() and second["deep"].keys() == value["deep"].keys()
    assert first["deep"]["leaf"] is shared
    plain = {"n": 1}
    first, second = scatter([plain], devices(2))
    assert first[0] == second[0] == plain and first[0] is not second[0] and first[0] is not plain


def test_S11_generators_are_handed_on():
    """A generator is not consumed."""
    stream = iter([1, 2])
    assert scatter([stream], devices(2)) == [[stream], [stream]] and next(stream) == 1


LENGTHS = (3, 1, 4, 2, 5)


def packed(lengths, enforce_sorted=False, **options):
    return pack_sequence(
        [numbers(size, 2, **options) + 10 * size for size in lengths], enforce_sorted=enforce_sorted
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_S12_packed_sequence_is_split_by_sequence(count):
    """Chunk i holds the sequences that a chunk of a padded batch would hold, in the
    caller's order.
    """
    value = packed(LENGTHS)
    padded, lengths = pad_packed_sequence(value, batch_first=True)
    chunks = scatter((value, padded), devices(count))
    for (chunk, expected), sizes in zip(chunks, lengths.chunk(count), strict=True):
        data, own = pad_packed_sequence(chunk, batch_first=True, total_length=padded.shape[1])
        assert torch.equal(data, expected) and torch.equal(own, sizes)
        assert torch.equal(chunk.sorted_indices[chunk.unsorted_indices], torch.arange(len(sizes)))


def test_S12_sorted_packed_sequence_stays_sorted():
    """Without indices before there are none after."""
    value = packed(sorted(LENGTHS, reverse=True), enforce_sorted=True)
    chunks = scatter(value, devices(2))
    assert [chunk.batch_sizes.tolist() for chunk in chunks] == [[3, 3, 3, 2, 1], [2, 1]]
    assert all(chunk.sorted_indices is None and chunk.unsorted_indices is None for chunk in chunks)
    assert_packed_same(gather(chunks, "cpu"), value)


def assert_packed_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_S12_packed_sequence_feeds_an_lstm():
    """An LSTM on chunks gives what it gives on the whole, gradients included."""
    torch.manual_seed(0)
    net = torch.nn.LSTM(2, 3).double()
    padded = torch.randn(5, 5, 2, dtype=torch.double, requires_grad=True)
    value = pack_padded_sequence(
        padded, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False
    )
    joined = gather([net(chunk)[0] for chunk in scatter(value, devices(2))], "cpu")
    whole = net(value)[0]
    left, right = (pad_packed_sequence(out, batch_first=True)[0] for out in (joined, whole))
    assert torch.allclose(left, right)
    grads = [
        torch.autograd.grad(out.square().sum(), padded, retain_graph=True)[0]
        for out in (left, right)
    ]
    assert torch.allclose(*grads) and grads[0].abs().sum() > 0


def test_S12_packed_sequence_counts():
    """Its number of sequences has to fit the other tensors, like a size."""
    with pytest.raises(
        ValueError,
        match=r"inputs\[0\]: size 5, 3 chunks; inputs\[1\]: size "
        r"1, 1 chunk\.",
    ):
        scatter((packed(LENGTHS), numbers(1)), devices(3))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_S13_complex(dim):
    """Complex tensors split and join like real ones, along negative dimensions too."""
    x = torch.complex(numbers(4, 4), -numbers(4, 4)).requires_grad_()
    chunks = scatter(x, devices(3), dim)
    assert_same(chunks, x.chunk(3, dim))
    if dim >= 0:
        assert_same(chunks, tuple(oracle.scatter(x, devices(3), dim)))
    joined = gather(chunks, "cpu", dim)
    assert_same(joined.detach(), x.detach())
    joined.abs().square().sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach())


def test_S14_no_device():
    """There has to be a device."""
    for call in (
        lambda: scatter(numbers(2), []),
        lambda: scatter("a", []),
        lambda: scatter_kwargs((1,), {}, []),
    ):
        with pytest.raises(RuntimeError, match="Expected at least one device to scatter to"):
            call()


def test_F9_empty_batch():
    """No rows are split into as many chunks as there are devices, each without rows."""
    assert [tuple(chunk.shape) for chunk in scatter(torch.ones(0, 3), devices(3))] == [(0, 3)] * 3
    assert gather(scatter(torch.ones(0, 3), devices(3)), "cpu").shape == (0, 3)


# --- scatter_kwargs ---


@pytest.mark.parametrize(
    "inputs,kwargs",
    [
        ((numbers(4),), {}),
        ((numbers(4),), None),
        ((), {"x": numbers(4)}),
        ((numbers(4), 1), {"x": numbers(4), "y": [1, {"z": None}]}),
        ((), {"a": [], "b": {}, "c": (), "x": {"n": {}, "x": numbers(4)}}),
        ((None,), {}),
        ((), {}),
        ((), None),
    ],
)
def test_K1_as_upstream(inputs, kwargs):
    """Both results have one entry per chunk; what is missing is padded; nothing gives nothing."""
    left, right = scatter_kwargs(inputs, kwargs, devices(2))
    assert len(left) == len(right)
    assert_same((left, right), oracle.scatter_kwargs(inputs, kwargs, devices(2)))


def test_K1_padding_is_not_shared():
    """Each chunk has keyword arguments of its own."""
    _, (first, second) = scatter_kwargs((numbers(4),), {}, devices(2))
    assert first is not second


def test_K2_a_setting_by_keyword_goes_with_one_row():
    """One row and a keyword that is no tensor are one chunk; upstream calls a replica without its
    input (#31460).
    """
    inputs, kwargs = oracle.scatter_kwargs((numbers(1),), {"flag": True}, devices(2))
    assert inputs[1] == () and kwargs[1] == {"flag": True}
    assert_same(
        scatter_kwargs((numbers(1),), {"flag": True}, devices(2)),
        (((numbers(1),),), ({"flag": True},)),
    )
    assert_same(
        scatter_kwargs((True,), {"x": numbers(1)}, devices(2)), (((True,),), ({"x": numbers(1)},))
    )


@pytest.mark.parametrize("inputs", [(numbers(2),), (numbers(2), 1)])
def test_K3_keywords_are_counted_with_the_rest(inputs):
    """A keyword tensor of another size raises, where upstream trips or loses it."""
    with pytest.raises(
        ValueError,
        match=r"inputs\[0\]: size 2, 2 chunks; kwargs\['mask'\]: "
        r"size 1, 1 chunk\.",
    ):
        scatter_kwargs(inputs, {"mask": numbers(1)}, devices(2))


def test_K4_keywords_only():
    """Keyword arguments alone are split, with empty positional ones."""
    value = {"x": numbers(4), "empty": [], "deep": {"none": None, "empty": ()}}
    assert_same(scatter_kwargs((), value, devices(2)), oracle.scatter_kwargs((), value, devices(2)))


# --- gather ---


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_G1_tensors_are_joined(dim):
    """Tensors are concatenated along dim."""
    parts = numbers(4, 4).split([3, 1], dim)
    assert_same(gather(parts, 0, dim), oracle.gather(parts, 0, dim))
    assert_same(gather(parts, "cpu", dim), numbers(4, 4))


def test_G1_one_chunk_is_gathered_too():
    """The output of a single chunk is a new tensor, and follows all rules."""
    x = numbers(3)
    out = gather([x], "cpu")
    assert torch.equal(out, x) and out is not x and out.data_ptr() != x.data_ptr()
    assert gather([{"n": 3}], "cpu") == {"n": [3]}


def test_G2_scalars_become_a_vector():
    """0-dim tensors give a vector and upstream's warning."""
    parts = [torch.tensor(1.0), torch.tensor(2.0)]
    with pytest.warns(UserWarning) as seen:
        out = gather(parts, "cpu")
    (said,) = (str(warning.message) for warning in seen)
    # backward would refuse a vector
    assert said.startswith(SCALAR_WARNING) and "Options(scalars='mean')" in said
    with pytest.warns(UserWarning, match=SCALAR_WARNING):
        assert_same(out, oracle.gather(parts, 0))


@pytest.mark.parametrize(
    "scalars,weights,expected",
    [
        ("mean", None, 2.0),
        ("sum", None, 4.0),
        ("weighted_mean", [3, 1], 1.5),
        ("weighted_mean", None, 2.0),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_G2_scalars_are_reduced_when_asked(scalars, weights, expected, dim):
    """A loss comes back as one number without a warning, gradients included, along whatever
    dimension.
    """
    parts = [torch.tensor(1.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = gather(
            [{"loss": part} for part in parts], "cpu", dim, scalars=scalars, weights=weights
        )["loss"]
    assert out.dim() == 0 and out.item() == expected
    out.backward()
    assert sum(part.grad * part.detach() for part in parts).item() == pytest.approx(expected)


def test_G2_weighted_mean_is_the_mean_of_the_whole_batch():
    """Means of unequal chunks, weighted by their rows, give the mean over all rows (B13)."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0])
    chunks = scatter(x, devices(2))
    sizes = [rows((chunk,), None, 0) for chunk in chunks]
    out = gather([chunk.mean() for chunk in chunks], "cpu", scalars="weighted_mean", weights=sizes)
    assert out.item() == pytest.approx(x.mean().item())
    assert (
        gather([torch.tensor(1.0)] * 2, "cpu", scalars="weighted_mean", weights=[0, 0]).item() == 1
    )


def test_G2_integers_have_a_fractional_mean():
    """Counts are averaged as numbers, and summed as counts."""
    parts = [torch.tensor(1), torch.tensor(2)]
    assert gather(parts, "cpu", scalars="mean").item() == 1.5
    assert gather(parts, "cpu", scalars="weighted_mean", weights=[1, 3]).item() == 1.75
    assert_same(gather(parts, "cpu", scalars="sum"), torch.tensor(3))


def test_G2_wrong_options():
    """Unknown rules and weights that do not fit raise."""
    with pytest.raises(ValueError, match="scalars='max'"):
        gather([torch.tensor(1.0)], "cpu", scalars="max")
    with pytest.raises(ValueError, match="3 weights for 1 chunks"):
        gather([torch.tensor(1.0)], "cpu", scalars="weighted_mean", weights=[1, 2, 3])
    with pytest.raises(ValueError, match="nothing to gather"):
        gather([], "cpu")


@pytest.mark.parametrize(
    "parts,dim",
    [
        ([torch.tensor(1.0)] * 2, 1),
        ([torch.tensor(1.0)] * 2, -1),
        ([torch.tensor(1.0), torch.ones(1)], 0),
    ],
)
def test_G2_scalars_along_another_dimension(parts, dim):
    """0-dim tensors have no dimension 1, nor company with 1-d tensors."""
    with pytest.raises((IndexError, RuntimeError)):
        oracle.gather(parts, 0, dim)
    with pytest.raises(IndexError, match="input tensor at index 0"):
        gather(parts, "cpu", dim)


def test_G3_none():
    """None from all replicas is None."""
    assert gather([None, None], "cpu") is None
    assert gather([{"x": None}] * 2, "cpu") == {"x": None}


@pytest.mark.parametrize(
    "parts", [[None, torch.ones(1)], [torch.ones(1), None], [torch.ones(1), 3], [{}, []]]
)
def test_G3_replicas_have_to_agree(parts):
    """Where one replica returns another kind of value, the place and both kinds are named."""
    kinds = ["None" if part is None else f"a {type(part).__name__}" for part in parts]
    with pytest.raises(ValueError) as caught:
        gather([{"x": [part]} for part in parts], "cpu")
    assert (f"output['x'][0]: replica 0 returned {kinds[0]}, replica 1 {kinds[1]}") in str(
        caught.value
    )


def test_G4_dicts():
    """Keys come in replica 0's order; subclasses stay what they are."""
    for make in (dict, OrderedDict):
        parts = [make(b=numbers(2), a=numbers(1)), make(a=numbers(1), b=numbers(2))]
        assert_same(gather(parts, "cpu"), oracle.gather(parts, 0))
    out = gather([defaultdict(list, x=numbers(1)), defaultdict(list, x=numbers(1))], "cpu")
    assert_same(out, defaultdict(list, x=torch.zeros(2)))
    assert out["new"] == []
    assert_same(gather([UserDict(x=numbers(1))] * 2, "cpu"), UserDict(x=torch.zeros(2)))
    assert dict(gather([Counter(a=1, b=0), Counter(a=2, b=0)], "cpu")) == {"a": [1, 2], "b": [0, 0]}
    assert gather([Labelled("kept"), Labelled("kept")], "cpu").label == "kept"


def test_G4_dicts_that_do_not_fit():
    """Different numbers of keys and different keys raise, as upstream."""
    for call in (lambda parts: gather(parts, "cpu"), lambda parts: oracle.gather(parts, 0)):
        with pytest.raises(ValueError, match="All dicts must have the same number of keys"):
            call([{"a": numbers(1)}, {"a": numbers(1), "b": numbers(1)}])
        with pytest.raises(KeyError, match="a"):
            call([{"a": numbers(1)}, {"b": numbers(1)}])


def test_G4_keys_of_one_text_are_told_apart():
    """Keys are compared, not their text."""

    class Key:
        def __repr__(self):
            return "key"

    a, b = Key(), Key()
    out = gather([{a: numbers(1), b: numbers(2)}] * 2, "cpu")
    assert list(out) == [a, b] and len(out[b]) == 4


def test_G4_model_output():
    """HF's ModelOutput comes back as itself, without the fields that are None."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    out = gather([outputs.SequenceClassifierOutput(logits=numbers(2, 2))] * 2, "cpu")
    assert (
        type(out) is outputs.SequenceClassifierOutput
        and out.logits.shape == (4, 2)
        and out.loss is None
    )


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        Lists,
        Tuples,
        lambda parts: Pair(*parts),
        torch.return_types.max,
        deque,
        UserList,
    ],
)
def test_G5_sequences(make):
    """Sequences of all kinds come back as themselves, as upstream."""
    parts = [make([numbers(2), numbers(1)]), make([numbers(1), numbers(1)])]
    left, right = gather(parts, "cpu"), oracle.gather(parts, 0)
    assert type(left) is type(right) is type(parts[0])
    assert_same(list(left), list(right))


def test_G5_what_constructors_forget():
    """A deque keeps its bound, a list's subclass its attributes, a tuple's subclass gets around its
    constructor.
    """

    class Strict(tuple):
        def __new__(cls, x, y=None):
            return super().__new__(cls, (x, y))

    bounded, marked = deque([numbers(1)], maxlen=1), Lists([numbers(1)])
    marked.name = "kept"
    assert gather([bounded, bounded], "cpu").maxlen == 1
    assert gather([marked, marked], "cpu").name == "kept"
    strict = Strict(numbers(1), numbers(2))
    strict.name = "kept"
    out = gather([strict, strict], "cpu")
    assert type(out) is Strict and len(out[1]) == 4 and out.name == "kept"
    assert gather([Nothing(), Nothing()], "cpu") == Nothing()
    assert gather([[], []], "cpu") == []


def test_G5_sets():
    """A set of one tensor is gathered; several have no order, so that is an error and no guess."""
    (out,) = gather([{numbers(1)}, {numbers(2)}], "cpu")
    assert out.tolist() == [0, 0, 1]
    assert type(gather([frozenset([numbers(1)])] * 2, "cpu")) is frozenset
    with pytest.raises(ValueError, match="no order"):
        gather([{numbers(1), numbers(2)}] * 2, "cpu")
    assert gather([{1, 2}, {3}], "cpu") == [{1, 2}, {3}]


class Bag:
    """A class of a program's own that can be iterated over."""

    def __init__(self, parts=()):
        self.parts = list(parts)

    def __iter__(self):
        return iter(self.parts)


class Keyed(Bag):
    """Cannot be made of its parts alone."""

    def __init__(self, parts, key):
        super().__init__(parts)
        self.key = key


def test_G5_iterable_classes():
    """They are made of their joined parts, as upstream; what has no tensors, or cannot be made so,
    is a list.
    """
    parts = [Bag([numbers(2), (numbers(1), None)]), Bag([numbers(1), (numbers(1), None)])]
    left, right = gather(parts, "cpu"), oracle.gather(parts, 0)
    assert type(left) is type(right) is Bag
    assert_same(left.parts, right.parts)
    for plain in (Bag(), Bag([1, "text"]), Keyed([numbers(1)], 3)):
        assert gather([plain, plain], "cpu") == [plain, plain]
    with pytest.raises(ValueError, match="different numbers of items: 2, 1"):
        gather([parts[0], Bag([numbers(1)])], "cpu")


def test_G6_lengths_have_to_agree():
    """Replicas that return sequences of different lengths raise, as upstream."""
    parts = [(numbers(1), numbers(1)), (numbers(1),)]
    with pytest.raises(ValueError):
        oracle.gather(parts, 0)
    with pytest.raises(
        ValueError, match="output: replicas returned different numbers of items: 2, 1"
    ):
        gather(parts, "cpu")


@pytest.mark.parametrize(
    "leaf",
    [
        1,
        2.5,
        True,
        "text",
        b"bytes",
        np.float32(1),
        Color.RED,
        range(2),
        int,
        torch.Size([2, 3]),
        object(),
    ],
)
def test_G7_leaves_become_a_list(leaf):
    """Whatever is neither tensor nor container comes back once per chunk."""
    assert gather([leaf, leaf], "cpu") == [leaf, leaf]
    assert_same(gather([(numbers(1), leaf)] * 2, "cpu"), (torch.zeros(2), [leaf, leaf]))


def test_G7_arrays_and_generators_become_a_list():
    """Arrays are not joined, generators not consumed, and None may stand among leaves."""
    array, stream = np.arange(2), iter([1])
    assert all(part is array for part in gather([array, array], "cpu"))
    assert gather([stream, stream], "cpu") == [stream, stream] and next(stream) == 1
    assert gather([None, 1], "cpu") == [None, 1]


@pytest.mark.parametrize("make", [Sample, Frozen, Slotted])
def test_G7_dataclass(make):
    """Dataclass instances are joined field by field (#41327)."""
    out = gather([make({"x": numbers(2)}), make({"x": numbers(1)})], "cpu")
    assert type(out) is make and out.x["x"].tolist() == [0, 1, 0]
    if make is Sample:
        assert out.label == ["label", "label"]


def test_G7_dataclasses_of_two_classes():
    """Two dataclasses are two kinds of value."""
    with pytest.raises(ValueError, match="replica 0 returned a Sample, replica 1 a Other"):
        gather([Sample(numbers(1)), Other(numbers(1))], "cpu")


@pytest.mark.parametrize(
    "shapes,dim",
    [([(2, 3), (2, 4)], 0), ([(2, 3), (1, 3)], 1), ([(2, 3), (2,)], 0), ([(2,), (0,), (2, 1)], 0)],
)
def test_G8_sizes_have_to_agree(shapes, dim):
    """Sizes other than along dim have to be equal; the first tensor that differs is named."""
    parts = [torch.ones(shape) for shape in shapes]
    with pytest.raises((RuntimeError, IndexError)):
        oracle.gather(parts, 0, dim)
    with pytest.raises(
        RuntimeError,
        match=rf"Input tensor at index {len(parts) - 1} has "
        r"invalid shape",
    ):
        gather(parts, "cpu", dim)


def test_G8_an_empty_vector_is_no_exception():
    """torch.cat ignores a tensor of shape (0,) among others; we do not."""
    with pytest.raises(
        RuntimeError,
        match=r"Input tensor at index 1 has invalid shape "
        r"\[0\], but expected \[2, 3\]",
    ):
        gather([torch.ones(2, 3), torch.ones(0)], "cpu")


@pytest.mark.parametrize(
    "first,second", [(torch.float16, torch.float32), (torch.float32, torch.int64)]
)
def test_G9_the_first_dtype_rules(first, second):
    """All parts are cast to the first one's dtype, and their gradients cast back."""
    parts = [torch.ones(2, dtype=first, requires_grad=True), torch.ones(1, dtype=second)]
    if second.is_floating_point:
        parts[1].requires_grad_()
    out = gather(parts, "cpu")
    assert_same(out.detach(), oracle.gather(parts, 0).detach())
    assert out.dtype is first
    out.sum().backward()
    assert all(part.grad.dtype is part.dtype for part in parts if part.requires_grad)


def test_G9_memory_format_is_kept():
    """channels_last parts give a channels_last whole."""
    part = numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert gather([part, part], "cpu").is_contiguous(memory_format=torch.channels_last)
    assert gather([part, part.contiguous()], "cpu").shape == (4, 3, 4, 5)


def test_G10_minus_one_is_the_cpu():
    """-1 names the CPU with upstream's warning, 'cpu' without."""
    with pytest.warns(FutureWarning, match="Using -1 to represent CPU tensor is deprecated"):
        assert gather([numbers(1)], -1).device.type == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gather([numbers(1)], "cpu").device.type == "cpu"
        assert gather([numbers(1)], torch.device("cpu")).device.type == "cpu"


def test_G11_scalars_beside_batches():
    """A loss and logits in one tuple: a vector and a batch."""
    parts = [(torch.tensor(1.0), numbers(2, 2)), (torch.tensor(2.0), numbers(1, 2))]
    with pytest.warns(UserWarning, match=SCALAR_WARNING):
        assert_same(gather(parts, "cpu"), oracle.gather(parts, 0))
    loss, _ = gather(parts, "cpu", scalars="sum")
    assert loss.item() == 3


def test_G12_states_of_an_lstm():
    """Tensors with the batch elsewhere are joined along dim all the same, as upstream."""
    parts = [(numbers(2, 3), numbers(1, 2, 4))] * 2
    assert_same(gather(parts, "cpu"), oracle.gather(parts, 0))
    assert gather(parts, "cpu")[1].shape == (2, 2, 4)


@pytest.mark.parametrize("chunks", [2, 3])
def test_S12_joined_sequences_lie_as_torch_packs_them(chunks):
    """Among many of one length, too: a loss compares ``data`` with that of packed targets."""
    lengths = torch.randint(4, 9, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    value = packed(lengths)
    joined = gather(scatter(value, devices(chunks)), "cpu")
    assert torch.equal(joined.data, value.data)
    assert torch.equal(joined.sorted_indices, value.sorted_indices)


def test_G12_packed_sequences_are_joined():
    """Packed sequences come back as one, sorted anew where they have to be."""
    value = packed(LENGTHS)
    joined = gather(scatter(value, devices(2), 1), "cpu", 1)
    for a, b in zip(pad_packed_sequence(joined), pad_packed_sequence(value), strict=True):
        assert torch.equal(a, b)
    sorted_parts = [packed((2, 1), True), packed((4, 3), True)]
    joined = gather(sorted_parts, "cpu")
    assert type(joined) is PackedSequence and joined.sorted_indices.tolist() == [2, 3, 0, 1]
    assert pad_packed_sequence(joined)[1].tolist() == [2, 1, 4, 3]
    joined = gather(scatter(packed((3, 2, 1)), devices(2)), "cpu")
    assert joined.sorted_indices.tolist() == [0, 1, 2]


def test_G13_a_parameter_as_output():
    """The same tensor from all replicas is repeated, and its gradients add up."""
    weight = torch.nn.Parameter(numbers(3))
    out = gather([weight, weight], "cpu")
    assert_same(out.detach(), numbers(3).repeat(2))
    (out * torch.tensor([1.0, 1, 1, 2, 2, 2])).sum().backward()
    assert weight.grad.tolist() == [3, 3, 3]


# --- autograd ---


def through(x, dim=0):
    return gather([chunk.sin() * chunk for chunk in scatter(x, devices(3), dim)], "cpu", dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_B6_derivatives_of_any_order(dim):
    """Scatter and gather are differentiable once, twice and three times."""
    torch.manual_seed(0)
    x = torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    assert gradcheck(lambda v: through(v, dim), x)
    assert gradgradcheck(lambda v: through(v, dim), x)

    def third(call):
        value = call(x).pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.square().sum()
        return grad

    assert torch.allclose(third(lambda v: through(v, dim)), third(lambda v: v.sin() * v))


def test_B8_chunks_are_differentiated_one_by_one():
    """Backward on one chunk, then on another, needs no retained graph."""
    x = numbers(4, requires_grad=True)
    first, second = scatter(x, devices(2))
    first.sum().backward()
    assert x.grad.tolist() == [1, 1, 0, 0]
    (2 * second).sum().backward()
    assert x.grad.tolist() == [1, 1, 2, 2]


def test_B9_unused_rows_get_zeros():
    """A loss on a slice of the output gives the other replicas zeros, not None."""
    parts = [numbers(2, requires_grad=True), numbers(2, requires_grad=True)]
    gather(parts, "cpu")[:1].sum().backward()
    assert [part.grad.tolist() for part in parts] == [[1, 0], [0, 0]]


def test_B9_no_gradient_at_all_is_none():
    """Where no chunk got a gradient, the input gets none either; where one did, the others count as
    zeros.
    """

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    x = numbers(4, requires_grad=True)
    first, second = scatter(x, devices(2))
    (Silent.apply(first).sum() + Silent.apply(second).sum()).backward()
    assert x.grad is None
    first, second = scatter(x, devices(2))
    (Silent.apply(first).sum() + second.sum()).backward()
    assert x.grad.tolist() == [0, 0, 1, 1]


def test_B12_no_reference_cycles():
    """What was split and joined is freed without the garbage collector."""
    value = [numbers(4, requires_grad=True), {"deep": (numbers(4), "leaf")}, Sample(numbers(4))]

    def rounds() -> None:
        gather(scatter(value, devices(2)), "cpu")
        scatter_kwargs((value,), {"k": value}, devices(2))

    def tangled() -> None:
        loop = [numbers(4)]
        loop.append(loop)  # type: ignore[arg-type]

    assert cycles(rounds) == []
    assert cycles(tangled) == ["Tensor"]


def test_B14_outputs_that_need_no_gradient():
    """Integers and detached outputs stay without gradients; an identity gives a new tensor."""
    x = numbers(4, requires_grad=True)
    chunks = scatter((x, torch.arange(4)), devices(2))
    kept, detached, whole = gather([(a, a.detach(), b) for a, b in chunks], "cpu")
    assert kept.requires_grad and not detached.requires_grad and not whole.requires_grad
    assert kept is not x and kept.data_ptr() != x.data_ptr() and whole.dtype is torch.int64


# --- types with rules of their own ---


class Graphs:
    """A list of graphs in one object, as a class from elsewhere may be."""

    def __init__(self, items):
        self.items = list(items)


def split_graphs(value, chunks, dim):
    size = -(-len(value.items) // chunks)
    return [type(value)(value.items[at : at + size]) for at in range(0, len(value.items), size)]


def join_graphs(parts, target_device, dim):
    assert isinstance(target_device, torch.device)
    return Graphs(item for part in parts for item in part.items)


class Speaking(Graphs):
    """A class that has the two methods."""

    def __scatter__(self, chunks, dim):
        return split_graphs(self, chunks, dim)

    @classmethod
    def __gather__(cls, parts, target_device, dim):
        return cls(item for part in parts for item in part.items)


class Tagged(dict):
    """A dict that wants another treatment than a dict gets."""

    def __scatter__(self, chunks, dim):
        return [Tagged(self, part=index) for index in range(chunks)]


def test_X_registered_type():
    """A registered pair splits and joins, for subclasses too, until its handle is removed
    (#52597).
    """
    handle = register_batch_type(Graphs, scatter=split_graphs, gather=join_graphs)

    class Derived(Graphs):
        pass

    chunks = scatter([numbers(3), Graphs("abc"), Derived("abc")], devices(2))
    assert [[part.items for part in chunk[1:]] for chunk in chunks] == [
        [["a", "b"]] * 2,
        [["c"]] * 2,
    ]
    assert gather([chunk[1] for chunk in chunks], "cpu").items == ["a", "b", "c"]
    handle.remove()
    handle.remove()
    value = Graphs("abc")
    assert all(chunk is value for chunk in scatter(value, devices(2)))


def test_X_registration_in_a_with():
    """The handle ends the registration with its block; meanwhile no other may register the
    class.
    """
    with register_batch_type(Graphs, scatter=split_graphs, gather=join_graphs):
        assert len(scatter(Graphs("ab"), devices(2))[0].items) == 1
        with pytest.raises(ValueError, match="Graphs is registered already"):
            register_batch_type(Graphs, scatter=split_graphs, gather=join_graphs)
    value = Graphs("ab")
    assert scatter(value, devices(2)) == [value, value]
    with pytest.raises(TypeError, match="expected a class and two callables"):
        register_batch_type(Graphs, scatter=None, gather=join_graphs)


def test_X_protocol():
    """__scatter__ and __gather__ are asked before any other rule, at any depth."""
    chunks = scatter_kwargs((), {"graphs": [Speaking("abc")]}, devices(2))[1]
    assert [chunk["graphs"][0].items for chunk in chunks] == [["a", "b"], ["c"]]
    joined = gather([chunk["graphs"] for chunk in chunks], "cpu")[0]
    assert type(joined) is Speaking and joined.items == ["a", "b", "c"]
    assert scatter(Tagged(a=1), devices(2)) == [{"a": 1, "part": 0}, {"a": 1, "part": 1}]


def test_X_registered_wins_over_protocol():
    """A registration overrides what the class says."""
    with register_batch_type(Speaking, scatter=lambda *_: ["one"], gather=lambda *_: "all"):
        assert scatter(Speaking("abc"), devices(2)) == ["one"]
        assert gather([Speaking("a"), Speaking("b")], "cpu") == "all"


def test_X_custom_chunks_are_counted():
    """What a rule returns counts like a tensor's chunks, and may not exceed the devices."""
    with pytest.raises(ValueError, match=r"inputs\[0\]: size 1, 1 chunk; inputs\[1\]: 2 chunks\."):
        scatter([numbers(1), Speaking("ab")], devices(2))
    with (
        register_batch_type(Graphs, scatter=lambda *_: [1, 2, 3], gather=join_graphs),
        pytest.raises(
            ValueError,
            match=r"inputs\[0\] was split by its own rule into 3 "
            r"chunks, expected 1 to 2",
        ),
    ):
        scatter([Graphs("abc")], devices(2))


def test_X_custom_outputs_have_to_agree():
    """A rule is not asked to join what it does not know."""
    with pytest.raises(ValueError, match="output: replica 0 returned a Speaking, replica 1 None"):
        gather([Speaking("a"), None], "cpu")


# --- rows ---


@pytest.mark.parametrize(
    "inputs,kwargs,dim,expected",
    [
        ((numbers(3, 2),), {}, 0, 3),
        ((numbers(3, 2),), None, 1, 2),
        ((numbers(3, 2),), None, -1, 2),
        ((torch.tensor(1.0), "a", {"x": [numbers(5)]}), {}, 0, 5),
        ((), {"x": Sample(UserDict(x=numbers(4)))}, 0, 4),
        ((packed(LENGTHS),), {}, 0, 5),
        ((1,), {"a": None}, 0, 0),
        ((numbers(2),), {"x": numbers(1, 3)}, 1, 3),
    ],
)
def test_rows(inputs, kwargs, dim, expected):
    """The size of the first tensor that has the dimension, 0 without any."""
    assert rows(inputs, kwargs, dim) == expected
