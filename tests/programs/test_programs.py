"""Programs for nn.DataParallel, the patterns of well-known libraries, do the same on both."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import oracle
import pytest
import torch
from harness import Apply, assert_same_grads, made_of, same, tiny_gpt2, trio
from torch import nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor

TWO = ["cpu", "cpu"]
BASES = {"ours": (DataParallel, ["cpu"] * 3), "upstream's": (oracle.DataParallel, [0, 1, 2])}


class Net(nn.Module):
    """A classifier with the parts that libraries look for."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.classifier = nn.Linear(6, 3)
        self.names = ["cat", "dog", "fish"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))

    def predict(self, x: torch.Tensor) -> list[str]:
        return [self.names[i] for i in self(x).argmax(1)]


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def data(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=draw), torch.randint(0, 3, (rows,), generator=draw)


class Graphs:
    """Some graphs as one: nodes, and which graph each belongs to."""

    def __init__(self, nodes: torch.Tensor, owner: torch.Tensor, count: int) -> None:
        self.nodes, self.owner, self.count = nodes, owner, count

    @classmethod
    def of(cls, graphs: list[torch.Tensor]) -> Graphs:
        owner = torch.cat([torch.full((len(nodes),), i) for i, nodes in enumerate(graphs)])
        return cls(torch.cat(graphs), owner, len(graphs))


@made_of(lin=(4, 3))
def pool(net: Any, graphs: Graphs) -> torch.Tensor:
    """One row per graph."""
    return torch.zeros(graphs.count, 3).index_add(0, graphs.owner, net.lin(graphs.nodes))


def graph_parallel(base: Any) -> Any:
    """After torch_geometric.nn.DataParallel: `scatter` and `forward` take a list of graphs."""

    class GraphParallel(base):  # type: ignore[misc]
        def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None) -> None:
            super().__init__(module, device_ids, output_device)
            self.src_device = torch.device("cpu")

        def forward(self, graphs: list[torch.Tensor]) -> Any:
            for t in chain(self.module.parameters(), self.module.buffers()):
                assert t.device == self.src_device
            inputs = self.scatter(graphs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            outputs = self.parallel_apply(replicas, inputs, None)
            return self.gather(outputs, self.output_device)

        def scatter(self, graphs: list[torch.Tensor], device_ids: Any) -> list[Graphs]:
            parts = min(len(device_ids), len(graphs))
            ends = torch.tensor([len(nodes) for nodes in graphs]).cumsum(0)
            part = (parts * (ends - 1) // ends[-1]).tolist()
            pairs = [*zip(graphs, part, strict=True)]
            groups = [[graph for graph, p in pairs if p == i] for i in range(parts)]
            return [Graphs.of(group) for group in groups if group]

    return GraphParallel


def same_on_both(use: Callable[..., Any]) -> None:
    """Compare what a function returns, and gradients of the models that it returns first."""
    found = []
    for base, ids in BASES.values():
        torch.manual_seed(2)
        found.append(use(base, ids))
    (models, *values), (others, *expected) = found
    torch.testing.assert_close(values, expected)
    for one, other in zip(models, others, strict=True):
        assert_same_grads(one, other)


@pytest.mark.parametrize("sizes", [[5, 1, 1, 2, 3], [1, 1], [7]])
def test_pyg_lists_split_by_size(sizes: list[int]) -> None:
    """Each replica is given one object of the user's class; gradients reach the nodes."""

    def use(base: Any, ids: Any) -> Any:
        model = graph_parallel(base)(pool(), ids)
        graphs = [torch.randn(n, 4, requires_grad=True) for n in sizes]
        out = model(graphs)
        out.square().sum().backward()
        return [model], out, [g.grad for g in graphs]

    same_on_both(use)


def ungathered(base: Any) -> Any:
    """After encoding.parallel.DataParallelModel."""

    class Model(base):  # type: ignore[misc]
        def gather(self, outputs: Any, output_device: Any) -> Any:
            return outputs

        def replicate(self, module: Any, device_ids: Any) -> Any:
            modules = super().replicate(module, device_ids)
            self.replicated = len(modules)
            return modules

    return Model


def parallel_criterion(base: Any, apply: Callable[..., list[Any]]) -> Any:
    """After encoding.parallel.DataParallelCriterion: only targets are still to be scattered."""

    class Criterion(base):  # type: ignore[misc]
        def forward(self, inputs: Any, *targets: Any, **kwargs: Any) -> Any:
            targets, kwargs = self.scatter(targets, kwargs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            pairs = [(i, *t) for i, t in zip(inputs, targets, strict=True)]
            losses = apply(replicas, pairs, kwargs)
            return sum(losses) / len(losses)

    return Criterion


def by_threads(replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
    """The library's own parallel_apply: a thread for each replica, called directly."""
    results: list[Any] = [None] * len(replicas)

    def work(i: int) -> None:
        with torch.enable_grad():
            results[i] = replicas[i](*inputs[i], **(kwargs[i] if kwargs else {}))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def weighted_loss(net: Any, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A criterion with a parameter of its own."""
    return nn.functional.cross_entropy(out * net.weight, target)


@pytest.mark.parametrize("how", ["threads", "parallel_apply"])
def test_encoding_parallel_loss(how: str) -> None:
    """A gather that returns the list, and a criterion that runs where the outputs came from."""

    def use(base: Any, ids: Any) -> Any:
        verbs: Any = raydp_parallel if base is DataParallel else oracle
        apply = by_threads if how == "threads" else verbs.parallel_apply
        model = ungathered(base)(net(), ids)
        loss_net = Apply(weighted_loss, weight=nn.Parameter(torch.tensor([1.0, 2.0, 3.0])))
        criterion = parallel_criterion(base, apply)(loss_net, ids)
        x, y = data(8)
        outputs = model(x)
        loss = criterion(outputs, y)
        loss.backward()
        assert ([len(out) for out in outputs], model.replicated) == ([3, 3, 2], 3)
        return [model, criterion], loss

    same_on_both(use)


class OurPassthrough(DataParallel[Any]):
    """Attributes that the wrapper has not got are the module's."""

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def test_getattr_passthrough() -> None:
    """No recursion while the object is made; methods run on the master, forward on the replicas."""
    model: Any = OurPassthrough(net(), TWO)
    assert model.names == ["cat", "dog", "fish"]
    assert model.device_ids == TWO and model.src_device_obj == torch.device("cpu")
    model.eval()
    x, _ = data()
    assert model.predict(x) == model.module.predict(x)
    torch.testing.assert_close(model(x), model.module(x))
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = model.absent
    copied = copy.deepcopy(model)
    assert copied.names == model.names and copied.module is not model.module
    torch.testing.assert_close(copied(x), model(x))
    with pytest.raises(AttributeError):
        _ = OurPassthrough.__new__(OurPassthrough).module  # before __init__


def test_G4_G5_outputs_and_caches_of_transformers_come_back_as_themselves() -> None:
    """A cache is one, of all rows, that the next step can be called with."""
    transformers = pytest.importorskip("transformers")
    ours, theirs, _ = trio(tiny_gpt2().eval(), 2)
    tokens = torch.arange(20).view(4, 5)
    one, other = ours(tokens, use_cache=True), theirs(tokens, use_cache=True)
    assert type(one) is type(other) and one.loss is None
    caches = one.past_key_values, other.past_key_values
    assert type(caches[0]) is type(caches[1]) is transformers.DynamicCache
    for mine, its in zip(*caches, strict=True):
        same(mine[:2], its[:2])
    same(one.logits, other.logits)
    one.logits.sum().backward()
    other.logits.sum().backward()
    assert_same_grads(ours, theirs)
    plain = [theirs.module(tokens[:, :1], past_key_values=cache).logits for cache in caches]
    same(*plain)


def test_transformers_decodes_with_a_cache(two: Executor) -> None:
    """By `generate`; the caller's own cache stays empty (S10)."""
    transformers = pytest.importorskip("transformers")
    module = tiny_gpt2().eval()
    model = DataParallel(copy.deepcopy(module), executor=two)
    ids = torch.randint(1, 32, (4, 6))
    asked = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(AttributeError, match=r"model\.call\('generate', \.\.\.\)"):
        model.generate(ids)
    with torch.no_grad():
        assert torch.equal(model.call("generate", ids, **asked), module.generate(ids, **asked))
        own = transformers.DynamicCache()
        model(ids[:, :5], past_key_values=own, use_cache=True)
        assert own.get_seq_length() == 0
