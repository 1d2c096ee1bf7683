"""The wrapper object and the flow of its forward: rows C1 to C17 and F1 to F9 of the contract."""

from __future__ import annotations

import copy
import io
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import numpy as np
import on_gpus
import oracle
import pytest
import torch
from harness import Apply, assert_same_grads, assert_same_state, made_of, raised, same, trio
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import raydp_parallel
from raydp_parallel import DataParallel, Options, data_parallel

TWO = ["cpu", "cpu"]
THREE = ["cpu", "cpu", "cpu"]


class Net(nn.Module):
    """Linear, batch norm, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def scalar() -> nn.Module:
    """A module that returns a 0-dim tensor: a loss."""
    return Apply(lambda net, x: (x * net.weight).mean(), weight=nn.Parameter(torch.ones(4)))


@made_of(weight=nn.Parameter(torch.ones(2)))
def keywords(net: Any, x: Any, *, bias: torch.Tensor | None = None, sign: int = 1) -> Any:
    """Takes one argument by position and others by name."""
    return x * net.weight * sign + (0 if bias is None else bias)


def is_none(_net: nn.Module, value: Any = "absent") -> torch.Tensor:
    """Says whether one value is None."""
    return torch.tensor([float(value is None)])


def batch(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def calls(model: DataParallel[Any]) -> list[int]:
    """How many forwards each replica ran."""
    there = model.executor.stats().replicas
    return [one.calls for one in there if one.device == "cpu" or on_gpus.asked() != "cpu"]


def test_C1_signature() -> None:
    """Upstream's four arguments; ours by name only. The class can be subscripted."""
    net = Net()
    for model in (
        DataParallel(net, TWO, "cpu", 1),
        DataParallel[Net](module=net, device_ids=TWO, output_device="cpu", dim=1),
    ):
        assert (model.module, model.device_ids, model.dim) == (net, TWO, 1)
        assert isinstance(model, nn.DataParallel)  # which accelerate unwraps
        assert model.output_device == torch.device("cpu")
    with pytest.raises(TypeError, match="gpus"):
        DataParallel(net, TWO, gpus=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        DataParallel(net, TWO, None, 0, None)  # type: ignore[misc]
    with pytest.raises(TypeError, match="module"):
        DataParallel(device_ids=TWO)  # type: ignore[call-arg]


@pytest.mark.parametrize("where", [None, 0, 1, -1, "cpu", torch.device("cpu"), "cuda:0"])
def test_C3_output_device(where: Any) -> None:
    """By default the master's device; each of upstream's forms is taken, one with its warning, and
    outputs go there. It can be changed later.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        model = DataParallel(Net(), [0, 1], where)
    told = [str(one.message) for one in caught if one.category is FutureWarning]
    assert len(told) == (where == -1)
    assert all("Using -1 to represent CPU tensor is deprecated" in text for text in told)
    assert model.output_device == torch.device("cpu")
    assert model(batch()).device == torch.device("cpu")
    model.output_device = "cpu"
    assert model.output_device == torch.device("cpu")
    with pytest.raises(ValueError, match="output_device=77"):
        model.output_device = 77


def test_C5_attributes_can_be_edited() -> None:
    """There are five; forward reads them, so an edit counts from the next call."""
    net, x = nn.Identity(), torch.arange(6.0).reshape(2, 3)
    model = DataParallel(net, TWO)
    assert (model.module, model.device_ids, model.dim) == (net, TWO, 0)
    assert model.src_device_obj == torch.device(model.output_device) == oracle.place
    assert set(dict(model.named_children())) == {"module"}
    before = calls(model) if model(x) is not None else []
    model.device_ids = ["cpu"]
    model(x)
    assert [b - a for a, b in zip(before, calls(model), strict=True)][:2] == [0, 0]  # in place
    model.device_ids, model.dim = THREE, 1
    assert torch.equal(model(x), x)
    assert calls(model)[2] >= 1


def test_C7_a_single_gpu_of_the_driver_takes_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the constructor, as upstream; not with two devices, nor if the driver has no such GPU."""
    moved: list[Any] = []
    net = Net()
    net.to = moved.append  # type: ignore[method-assign]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for ids in ([0, 1], ["cpu"], [1]):
        DataParallel(net, ids)
        assert moved == []
    DataParallel(net, [0])
    assert moved == [torch.device("cuda", 0)]


def test_C8_constructor_does_not_check_devices() -> None:
    """A module that is still elsewhere may be wrapped; forward looks (pytorch#17363)."""
    net = Net().to("meta")
    net.first.to_empty(device="cpu")
    model = DataParallel(net, TWO)
    error = raised(lambda: model(batch()))
    assert isinstance(error, RuntimeError) and (
        "module must have its parameters and buffers on device"
    ) in str(error)
    model.to_empty(device="cpu")
    net.load_state_dict(Net().state_dict())
    assert model(batch()).shape == (6, 3)


def test_C9_loading() -> None:
    """Names begin with ``module.``; loaded weights reach the replicas."""
    ours, theirs, plain = trio(Net(), 2)
    for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [n for n, _ in getattr(ours, names)()] == [n for n, _ in getattr(theirs, names)()]
    trained = Net()
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(trained.state_dict())
    wrapped = {f"module.{k}": v for k, v in trained.state_dict().items()}
    ours(batch())
    for model in (ours, theirs):
        model.load_state_dict(wrapped)
    torch.testing.assert_close(ours(batch()), theirs(batch()), rtol=0, atol=0)
    state = ours.state_dict()
    consume_prefix_in_state_dict_if_present(state, "module.")
    plain.load_state_dict(state)
    assert_same_state(ours, plain)


def test_C10_attributes_are_not_forwarded() -> None:
    """The module's attributes are not the wrapper's, and the other way round."""
    model = DataParallel(nn.Linear(4, 2), TWO)
    with pytest.raises(
        AttributeError, match="'DataParallel' object has no attribute 'in_features'"
    ):
        _ = model.in_features
    model.in_features = 7
    assert model.module.in_features == 4
    assert model(batch()).shape == (6, 2)


def test_C11_an_attribute_that_takes_long_to_look_at_is_named_once() -> None:
    """With its size; one that is small is not."""
    net = nn.Sequential(nn.Linear(4, 2))
    net[0].table, net.small = [np.zeros(1 << 20)], np.zeros(1 << 15)
    model = DataParallel(net, TWO)
    with pytest.warns(UserWarning, match=r"^module\.0\.table takes 8 MB, and .* a buffer") as told:
        for net.small[0] in range(3):
            model(batch())
    assert len(told) == 1


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_C12_copies(way: str, ran: bool) -> None:
    """A copy has a module of its own and the same ids, and both run, before and after a forward."""
    model = DataParallel(Net(), TWO, dim=0, options=Options(unused_grads="none"))
    if ran:
        model(batch())
    again = harness.copied(way, model)
    assert type(again) is DataParallel and again.module is not model.module
    assert (again.device_ids, again.dim) == (TWO, 0)
    assert again.output_device == model.output_device
    assert_same_state(again, model)
    assert torch.equal(again(batch()), model(batch()))
    with torch.no_grad():
        again.module.last.weight.zero_()
        again.module.last.bias.fill_(5)
    assert again(batch()).eq(5).all()
    assert not model(batch()).eq(5).any()


@pytest.mark.upstream
def test_C14_C15_what_torch_does_to_the_wrapper_is_refused() -> None:
    """In the same words as of upstream's class."""
    from torch.onnx._internal.torchscript_exporter import utils

    calls: dict[str, Callable[[Any], Any]] = {
        "can't be used with nn.DataParallel": lambda model: torch.func.functional_call(
            model, dict(model.named_parameters()), batch()
        ),
        "not supported by ONNX": lambda model: utils.export(model, (batch(),), io.BytesIO()),
        "variable number of arguments": torch.jit.script,
    }
    for words, call in calls.items():
        net = nn.Linear(4, 2)
        ours = raised(lambda call=call, net=net: call(DataParallel(net, TWO)))
        theirs = raised(lambda call=call, net=net: call(nn.DataParallel(net)))
        assert type(ours) is type(theirs)
        assert all(words in str(error) for error in (ours, theirs))


@pytest.mark.parametrize("ids", [TWO, ["cpu"]])
def test_C16_profiler_range(ids: list[str]) -> None:
    """A profile shows the forward, whatever runs it."""
    model = DataParallel(nn.Linear(4, 2), ids)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch())
    names = [event.name for event in profile.events()]
    assert names.count("raydp_parallel.DataParallel.forward") == 1


def recording(base: type) -> type:
    """A subclass that writes down how its methods are called, by names of its own."""

    class Recording(base):  # type: ignore[misc]
        def scatter(self, args: Any, named: Any, ids: Any) -> Any:
            self.log.append(("scatter", type(args), len(args), sorted(named), len(ids)))
            return super().scatter(args, named, ids)

        def replicate(self, net: Any, ids: Any) -> Any:
            self.log.append(("replicate", net is self.module, len(ids)))
            return super().replicate(net, ids)

        def parallel_apply(self, nets: Any, args: Any, named: Any) -> Any:
            sizes = [tuple(len(arg) for arg in chunk) for chunk in args]
            self.log.append(("parallel_apply", len(nets), sizes, [sorted(k) for k in named]))
            return super().parallel_apply(nets, args, named)

        def gather(self, outs: Any, where: Any) -> Any:
            sizes = [len(out) for out in outs]
            self.log.append(("gather", type(outs), sizes, where == self.output_device))
            return super().gather(outs, where)

    return Recording


@pytest.mark.parametrize(("count", "rows"), [(1, 4), (2, 1), (2, 5), (3, 2)])
def test_C17_override_points(count: int, rows: int) -> None:
    """On self, in order, with upstream's arguments; with one device only scatter is called."""
    net, x = keywords(), torch.randn(rows, 2)
    logs = []
    for base, ids in ((DataParallel, ["cpu"] * count), (oracle.DataParallel, list(range(count)))):
        model = recording(base)(copy.deepcopy(net), ids)
        model.log = []
        model(x, bias=x, sign=-1)
        logs.append(model.log)
    assert logs[0] == logs[1]
    verbs = "scatter", "replicate", "parallel_apply", "gather"
    assert [entry[0] for entry in logs[0]] == [*verbs[: 1 if count == 1 else 4]]


class Marked(nn.Module):
    """Tells what it was given as attributes, and what it finds without."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.scale = torch.ones(())
        self.number = -1
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.table + self.number

    def halved(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) / 2


def test_C17_methods_and_submodules_of_replicas() -> None:
    """They run where the replica is; values are the module's, as it is now."""
    net, x = Marked(), batch()
    first, second = raydp_parallel.replicate(net, TWO)
    assert (first.number, second.number, net.number) == (-1, -1, -1)
    out = raydp_parallel.parallel_apply([first.halved, second.halved], [(x,), (x,)])
    torch.testing.assert_close(out[0], out[1])
    first.inner(x).sum().backward()
    assert torch.equal(net.inner.bias.grad, torch.full((2,), 6.0))
    torch.testing.assert_close(first.forward(x), net(x))
    with torch.no_grad():
        net.inner.weight.mul_(3)
    torch.testing.assert_close(second(x=x), net(x))


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda r: r.parameters(), "is in another process. Change the module"),
        (lambda r: r.eval(), "is in another process. Change the module"),
        (lambda r: setattr(r, "number", 1), "on the module"),
        (lambda r: setattr(r.inner, "device", "cpu"), "on the module"),
        (lambda r: r.inner.weight, "no attribute 'weight'"),
        (lambda r: r.absent, "no attribute 'absent'"),
    ],
)
def test_C17_what_a_replica_cannot_do_says_so(use: Any, says: str) -> None:
    """Nothing that a program does to a replica is lost in silence."""
    (replica,) = raydp_parallel.replicate(Marked(), ["cpu"])
    with pytest.raises(AttributeError, match=says):
        use(replica)


@pytest.mark.parametrize("ids", [["cpu"], TWO])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "the same parameter"])
def test_F1_tensors_on_two_devices(ids: list[str], kind: str) -> None:
    """In each forward, in upstream's words; put right, the model runs."""
    net = Net()
    model = DataParallel(net, ids)
    model(batch())
    if kind == "parameter":
        net.last.weight = nn.Parameter(net.last.weight.detach().to("meta"))
    elif kind == "buffer":
        net.norm.running_var = net.norm.running_var.to("meta")
    else:  # which is found although it is the same object
        torch.utils.swap_tensors(net.last.weight, nn.Parameter(torch.empty(3, 6, device="meta")))
    text = rf"parameters and buffers on device {oracle.place} \(device_ids\[0\]\) but found one of"
    with pytest.raises(RuntimeError, match=f"module must have its {text} them on device: meta"):
        model(batch())
    net.last.weight = nn.Parameter(torch.zeros(3, 6))
    net.norm.running_var = torch.ones(6)
    assert model(batch()).shape == (6, 3)


@pytest.mark.parametrize(
    ("rows", "ran"),
    [(1, [1, 0, 0]), (2, [1, 1, 0]), (4, [1, 1, 0]), (5, [1, 1, 1]), (None, [1, 0, 0])],
)
def test_F3_F4_as_many_replicas_as_chunks(rows: int | None, ran: list[int]) -> None:
    """Others stay idle. Without arguments the first one runs; gradients are its alone."""
    net = Apply(
        lambda net, *x: net.last(*x or (net.own,)), last=nn.Linear(4, 2), own=torch.ones(1, 4)
    )
    three, inputs = trio(net, 3), [] if rows is None else [batch(rows)]
    three.ours(batch(3))
    before = calls(three.ours)
    ours, theirs = three.ours(*inputs), three.theirs(*inputs)
    after = calls(three.ours)
    assert [b - a for a, b in zip(before, after, strict=True)][:3] == ran
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for out in (ours, theirs):
        out.sum().backward()
    assert_same_grads(three.ours, three.theirs)


@pytest.mark.parametrize(("rows", "chunks"), [(1, 1), (0, 2)])
def test_F6_F9_one_chunk_and_no_rows_are_gathered(rows: int, chunks: int) -> None:
    """Scalars become a vector, with upstream's warning: of one, or the NaN of each empty chunk."""
    three, outs = trio(scalar(), 2), []
    for model in (three.ours, three.theirs):
        with pytest.warns(UserWarning, match="all input tensors were scalars") as caught:
            outs.append(model(torch.ones(rows, 4)))
        assert model is three.theirs or caught[0].filename == __file__
    torch.testing.assert_close(*outs, equal_nan=True)
    assert outs[0].shape == (chunks,)


def test_F7_all_chunks_end_before_an_error_is_raised(tmp_path: Path) -> None:
    """The others run to their end, and only then the failure is raised."""

    def first_fails(_net: Any, rank: torch.Tensor) -> torch.Tensor:
        if rank[0] == 0:
            raise ValueError("chunk 0")
        while not (tmp_path / "go on").exists():
            time.sleep(0.001)
        (tmp_path / f"ended {int(rank[0])}").touch()
        return rank

    model = DataParallel(Apply(first_fails), THREE)
    first, *_ = calls(model)

    def let() -> None:
        while calls(model)[:1] != [first + 1]:  # until its answer was taken
            time.sleep(0.001)
        (tmp_path / "go on").touch()

    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="replica 0"):
        pool.submit(let)
        model(torch.arange(3.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ended 1", "ended 2", "go on"]


def test_F7_may_be_called_from_several_threads() -> None:
    """Each gets its own outputs and gradients, also large ones."""
    nets = [nn.Linear(4, 2).double(), nn.Linear(4, 1 << 16).double()]
    models = [DataParallel(net, TWO) for net in nets]

    def work(index: int) -> None:
        net, model = nets[index % 2], models[index % 2]
        for _ in range(5):
            x = batch(4 + index).double().requires_grad_()
            out = model(x)
            (out.sum() * (index + 1)).backward()
            torch.testing.assert_close(out, net(x))
            torch.testing.assert_close(x.grad, (index + 1) * net.weight.sum(0).expand_as(x))

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(4))] == [None] * 4
    for number, net in enumerate(nets):
        rows = sum(5 * (i + 1) * batch(4 + i).double().sum(0) for i in (number, number + 2))
        torch.testing.assert_close(net.weight.grad, rows.expand_as(net.weight))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rows", [1, 6])
def test_F8_functional_form(count: int, rows: int) -> None:
    """Output, gradients and buffers are upstream's function's."""
    mine, theirs = Net(), Net()
    theirs.load_state_dict(mine.state_dict())
    x = batch(rows)
    for net in (mine, theirs):
        net.train(rows > 1)  # one row has no variance
    out = data_parallel(mine, x, ["cpu"] * count)
    expected = oracle.data_parallel(theirs, x, list(range(count)))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_same_grads(mine, theirs)
    assert_same_state(mine, theirs)


X = torch.arange(4.0)


@pytest.mark.parametrize("inputs", [X, [X, X], {"a": X}, (X,), None, (), (None,)])
def test_F8_what_counts_as_one_argument(inputs: Any) -> None:
    """``None`` runs one replica without arguments; ``(None,)`` gives None to every one."""
    net = Apply(is_none) if str(inputs) in ("None", "()", "(None,)") else nn.Identity()
    same(data_parallel(net, inputs, TWO), oracle.data_parallel(net, inputs, [0, 1]))


def test_F8_keyword_arguments_dim_and_defaults() -> None:
    """``dim`` goes for both ends, all GPUs are the default; one gives the raw output."""
    x, bias = torch.randn(3, 2), torch.randn(3, 2)
    for kwargs in ({"module_kwargs": {"bias": bias, "sign": -1}}, {}):
        outs = [one(keywords(), x, **kwargs) for one in (data_parallel, oracle.data_parallel)]
        torch.testing.assert_close(*outs, rtol=0, atol=0)
    wide = torch.randn(2, 5)
    assert torch.equal(data_parallel(nn.Identity(), wide, TWO, None, 1), wide)
    assert torch.equal(data_parallel(nn.Identity(), wide, TWO, "cpu", -1), wide.cpu())
    with torch.no_grad():
        assert not data_parallel(Net().eval(), batch(), TWO).requires_grad
    assert data_parallel(scalar(), torch.ones(4, 4), ["cpu"]).dim() == 0


@pytest.mark.upstream
def test_the_oracle_leaves_torch_alone() -> None:
    """Upstream's own modules still refuse CPU tensors, and none of their names is ours."""
    upstream = sys.modules["torch.nn.parallel._functions"]
    with pytest.raises((AssertionError, RuntimeError), match=r"CPU|cpu"):
        upstream.Gather.apply("cpu", 0, torch.ones(1, device="cpu"))
    assert nn.DataParallel is not oracle.DataParallel
    names = "_functions", "comm", "data_parallel", "parallel_apply", "replicate", "scatter_gather"
    for name in names:
        assert sys.modules[f"torch.nn.parallel.{name}"].__dict__.get("torch", torch) is torch
    assert torch._C is sys.modules["torch._C"]
    assert torch.accelerator.device_index is not oracle._no_context
