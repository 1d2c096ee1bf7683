"""Programs that were written for nn.DataParallel: the patterns of well-known libraries, small, on
us and on upstream.

Each is written once over a base class or a wrapping function, and must do the same under both.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from harness import assert_same_grads, assert_same_state, tiny_gpt2
from torch import nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor, Options

pytestmark = pytest.mark.usefixtures("cluster")

TWO = ["cpu", "cpu"]
BASES = {"ours": (DataParallel, ["cpu"] * 3), "upstream's": (oracle.DataParallel, [0, 1, 2])}
WRAPS: tuple[Callable[..., Any], ...] = (
    lambda module, **kwargs: DataParallel(module, TWO, **kwargs),
    lambda module, **kwargs: oracle.DataParallel(module, [0, 1], **kwargs),
)


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


def train(model: nn.Module, steps: int = 3) -> nn.Module:
    """A plain training loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        x, y = data()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


# --- torch_geometric: lists of graphs, split by their sizes ---


class Graphs:
    """Some graphs as one: nodes, and which graph each belongs to."""

    def __init__(self, nodes: torch.Tensor, owner: torch.Tensor, count: int) -> None:
        self.nodes, self.owner, self.count = nodes, owner, count

    @classmethod
    def of(cls, graphs: list[torch.Tensor]) -> Graphs:
        owner = torch.cat([torch.full((len(nodes),), i) for i, nodes in enumerate(graphs)])
        return cls(torch.cat(graphs), owner, len(graphs))


class Pool(nn.Module):
    """One row per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, graphs: Graphs) -> torch.Tensor:
        rows = self.lin(graphs.nodes)
        return torch.zeros(graphs.count, 3).index_add(0, graphs.owner, rows)


def graph_parallel(base: Any) -> Any:
    """After torch_geometric.nn.DataParallel: `scatter` and `forward` take a list of graphs."""

    class GraphParallel(base):  # type: ignore[misc]
        def __init__(
            self, module: nn.Module, device_ids: Any = None, output_device: Any = None
        ) -> None:
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
            groups = [
                [g for g, p in zip(graphs, part, strict=True) if p == i] for i in range(parts)
            ]
            return [Graphs.of(group) for group in groups if group]

    return GraphParallel


@pytest.mark.parametrize("sizes", [[5, 1, 1, 2, 3], [1, 1], [7]])
def test_pyg_lists_split_by_size(sizes: list[int]) -> None:
    """Each replica is given one object of the user's class, tensors inside; gradients reach the
    nodes.
    """
    results = []
    for base, ids in BASES.values():
        torch.manual_seed(2)
        model = graph_parallel(base)(Pool(), ids)
        graphs = [torch.randn(n, 4, requires_grad=True) for n in sizes]
        out = model(graphs)
        out.square().sum().backward()
        results.append((model, out, [g.grad for g in graphs]))
    (ours, out, grads), (theirs, expected, expected_grads) = results
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(grads, expected_grads)
    assert_same_grads(ours, theirs)


# --- PyTorch-Encoding: outputs stay apart, and losses are parallel ---


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
    """After encoding.parallel.DataParallelCriterion: the inputs are scattered already, the targets
    are not.
    """

    class Criterion(base):  # type: ignore[misc]
        def forward(self, inputs: Any, *targets: Any, **kwargs: Any) -> Any:
            targets, kwargs = self.scatter(targets, kwargs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            losses = apply(
                replicas, [(i, *t) for i, t in zip(inputs, targets, strict=True)], kwargs
            )
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


class WeightedLoss(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out * self.weight, target)


@pytest.mark.parametrize("how", ["threads", "parallel_apply"])
def test_encoding_parallel_loss(how: str) -> None:
    """A gather that returns the list, and a criterion that runs where the outputs came from."""
    results = []
    for name, (base, ids) in BASES.items():
        apply = by_threads
        if how == "parallel_apply":
            apply = raydp_parallel.parallel_apply if name == "ours" else oracle.parallel_apply
        torch.manual_seed(2)
        model, criterion = (
            ungathered(base)(net(), ids),
            parallel_criterion(base, apply)(WeightedLoss(), ids),
        )
        x, y = data(8)
        outputs = model(x)
        loss = criterion(outputs, y)
        loss.backward()
        results.append((model, criterion, loss, [len(out) for out in outputs], model.replicated))
    ours, theirs = results
    torch.testing.assert_close(ours[2], theirs[2])
    assert ours[3:] == theirs[3:] == ([3, 3, 2], 3)
    assert_same_grads(ours[0], theirs[0])
    assert_same_grads(ours[1], theirs[1])


# --- replicate, overridden for what each device has of its own ---


class Centres(nn.Module):
    """Distances to centres that are no parameters: a plain tensor, and a flag for replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.centres = torch.zeros(3)
        self.replica = -1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.lin(x) - self.centres
        return rows, torch.full((len(x),), self.replica)


def with_centres(base: Any) -> Any:
    """After the many subclasses that move plain tensors to each replica's device, and mark it."""

    class WithCentres(base):  # type: ignore[misc]
        def replicate(self, module: Any, device_ids: Any) -> Any:
            replicas = super().replicate(module, device_ids)
            for i, replica in enumerate(replicas):
                if hasattr(module, "centres"):
                    replica.centres = module.centres.to("cpu") + 0.5
                replica.replica = i
            return replicas

    return WithCentres


def test_replicate_gives_each_device_its_own_attributes() -> None:
    """Forward sees what was set on its replica; the module does not."""
    results = []
    for base, ids in BASES.values():
        torch.manual_seed(2)
        model = with_centres(base)(Centres(), ids)
        rows, which = model(data(6)[0])
        rows.square().sum().backward()
        assert model.module.replica == -1 and model.module.centres.eq(0).all()
        results.append((model, rows, which))
    (ours, rows, which), (theirs, expected, _) = results
    assert which.tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)
    assert_same_grads(ours, theirs)


# --- CLIP: a second verb of the wrapper, for a part of the model ---


class Clip(nn.Module):
    """Two encoders, one of which is used alone."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(4, 3)
        self.text = nn.Linear(4, 3)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return (self.visual(image) * self.text(text)).sum(1)


def encoding(base: Any) -> Any:
    """A subclass with another method that replicates a submodule of the wrapped module."""

    class Encoding(base):  # type: ignore[misc]
        def encode_image(self, *inputs: Any, **kwargs: Any) -> Any:
            inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
            replicas = self.replicate(self.module.visual, self.device_ids[: len(inputs)])
            return self.gather(self.parallel_apply(replicas, inputs, kwargs), self.output_device)

    return Encoding


def test_clip_encodes_images_in_parallel() -> None:
    """The part and the whole are used in turn, and both get gradients."""
    results = []
    for base, ids in BASES.values():
        torch.manual_seed(2)
        model = encoding(base)(Clip(), ids)
        x, _ = data(7)
        encoded = model.encode_image(x)
        (encoded.square().sum() + model(x, -x).sum()).backward()
        results.append((model, encoded))
    (ours, encoded), (theirs, expected) = results
    torch.testing.assert_close(encoded, expected, rtol=0, atol=0)
    assert_same_grads(ours, theirs)


# --- __getattr__ passthrough: the most frequent subclass ---


def passthrough(base: Any) -> Any:
    """Attributes that the wrapper has not got are the module's."""

    class Passthrough(base):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    return Passthrough


class OurPassthrough(DataParallel[Any]):
    """The same by another of its spellings, where pickle finds it."""

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


@pytest.mark.parametrize("make", [passthrough(DataParallel), OurPassthrough])
def test_getattr_passthrough(make: Any) -> None:
    """No recursion while the object is made; methods run on the master, forward on the replicas."""
    model = make(net(), TWO)
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


def test_getattr_passthrough_survives_pickle() -> None:
    """Unpickling asks an object that has no module yet for attributes."""
    model = OurPassthrough(net().eval(), TWO)
    again = pickle.loads(pickle.dumps(model))
    assert again.names == model.names
    assert torch.equal(again(data()[0]), model(data()[0]))


class WithHead(DataParallel[Any]):
    """A subclass with a module besides."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, TWO)
        self.head = nn.Dropout()
        self.absent = None


def test_modes_reach_what_a_subclass_has_besides() -> None:
    """As those of any module."""
    model = WithHead(net())
    assert model.eval() is model and not model.training
    assert not model.module.training and not model.head.training
    assert model.train().head.training and model.module.features.training


def test_getattr_passthrough_before_module_is_set() -> None:
    """An instance without __init__ says AttributeError, as upstream's would, and not
    RecursionError.
    """
    bare = OurPassthrough.__new__(OurPassthrough)
    with pytest.raises(AttributeError):
        _ = bare.module


# --- programs that ask whether a model is wrapped ---


def test_isinstance_and_unwrapping() -> None:
    """accelerate's loop, ultralytics' de_parallel, timm's and MONAI's questions all find the live
    master.
    """
    module = net()
    model: Any = DataParallel(module, TWO)
    assert isinstance(model, torch.nn.DataParallel) and isinstance(
        model, torch.nn.parallel.DataParallel
    )
    unwrapped = model
    while isinstance(unwrapped, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        unwrapped = unwrapped.module
    assert unwrapped is module
    assert hasattr(model, "module") and not hasattr(module, "module")
    assert (model.module if isinstance(model, nn.DataParallel) else model) is module
    assert type(model) not in (nn.DataParallel,) and type(model).__name__ == "DataParallel"


def test_timm_keyword_ids() -> None:
    """``DataParallel(model, device_ids=list(range(n)))``."""
    model = DataParallel(net(), device_ids=list(range(2)))
    assert model(data()[0]).shape == (8, 3)


def test_transformers_n_gpu_loop() -> None:
    """Expanded scalars in, one loss per replica out, ``loss.mean()`` or a sum over tokens:
    gradients are upstream's.
    """
    results = []
    for wrap, n_gpu in zip(WRAPS, (2, 2), strict=True):
        model = wrap(LossModel(net()))
        x, y = data(6)
        items = torch.tensor(6).unsqueeze(0).expand(n_gpu, -1)
        with pytest.warns(UserWarning, match="all input tensors were scalars"):
            outputs = model(
                input=x, labels=y, num_items_in_batch=items.reshape(n_gpu), return_dict=True
            )
        loss = outputs["loss"].sum()
        (loss + outputs["loss"].mean() * 0.5).backward()
        results.append((model, outputs))
    (ours, out), (theirs, expected) = results
    assert type(out) is type(expected) is Output
    assert out["loss"].shape == (2,) and out["logits"].shape == (6, 3)
    torch.testing.assert_close(dict(out), dict(expected), rtol=0, atol=0)
    assert_same_grads(ours, theirs)


class Output(OrderedDict[str, Any]):
    """Like transformers' ModelOutput: an ordered dict, made of pairs."""


class LossModel(nn.Module):
    """Computes its own loss, and asks for its own device on the way."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.model = module

    def forward(
        self,
        input: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor,
        return_dict: bool = False,
    ) -> Any:
        logits = self.model(input)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch[0]
        return Output(loss=loss, logits=logits) if return_dict else (loss, logits)


class AsksParameters(nn.Module):
    """``self.device`` and ``self.dtype`` of transformers' models: the first parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = next(self.parameters())
        return self.lin(x.to(first.device, first.dtype))


def test_transformers_records_outputs(two: Executor) -> None:
    """Hidden states, and the logits of a router, which its loss needs: which outputs a class can
    record is entered by constructors, and in a replica none ran.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        **sizes,
        intermediate_size=32,
        num_key_value_heads=1,
        num_local_experts=4,
        vocab_size=50,
        output_router_logits=True,
        router_aux_loss_coef=1.0,
        pad_token_id=0,
    )
    module = transformers.MixtralForCausalLM(config)
    plain, model = copy.deepcopy(module), DataParallel(module, executor=two)
    words = torch.randint(1, 50, (4, 6))
    found = model(input_ids=words, labels=words, output_hidden_states=True)
    parts = [plain(input_ids=w, labels=w, output_hidden_states=True) for w in words.chunk(2)]
    torch.testing.assert_close(found.loss, torch.stack([part.loss for part in parts]))
    torch.testing.assert_close(found.aux_loss, torch.stack([part.aux_loss for part in parts]))
    assert len(found.hidden_states) == 3
    expected = torch.cat([part.hidden_states[1] for part in parts])
    torch.testing.assert_close(found.hidden_states[1], expected)
    found.loss.sum().backward()
    sum(part.loss for part in parts).backward()
    assert_same_grads(model, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 2])
def test_transformers_decodes_with_a_cache(two: Executor, devices: int) -> None:
    """By `generate` in the replicas; and step by step with the caller's own cache with one device,
    which stays empty with several (S10).
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = tiny_gpt2().eval()
    model = DataParallel(copy.deepcopy(module), ["cpu"] * devices, executor=two)
    ids = torch.randint(1, 32, (4, 6))
    asked = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        assert torch.equal(model.call("generate", ids, **asked), module.generate(ids, **asked))
        own = transformers.DynamicCache()
        if devices > 1:
            with pytest.warns(UserWarning, match="forward changed a DynamicCache"):
                model(ids[:, :5], past_key_values=own, use_cache=True)
            assert own.get_seq_length() == 0
            return
        for at in range(6):
            out = model(ids[:, at : at + 1], past_key_values=own, use_cache=True)
            assert out.past_key_values is own
            assert own.get_seq_length() == at + 1
            torch.testing.assert_close(out.logits[:, 0], module(ids[:, : at + 1]).logits[:, -1])


def test_transformers_device_property() -> None:
    """Upstream's replicas have no parameters and die of StopIteration here; ours have them."""
    out = DataParallel(AsksParameters(), TWO)(torch.ones(4, 4, dtype=torch.float64))
    assert out.dtype is torch.float32
    with pytest.raises(StopIteration):
        oracle.DataParallel(AsksParameters(), [0, 1])(torch.ones(4, 4))


def test_mean_of_losses_as_an_option() -> None:
    """The weighted mean is the loss of the whole batch, also where chunks are uneven."""
    module = LossModel(net().eval())
    x, y = data(5)
    model = DataParallel(MeanLoss(module), TWO, options=Options(scalars="weighted_mean"))
    loss = model(x, y)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(module.model(x), y))
    assert loss.dim() == 0


class MeanLoss(nn.Module):
    """The mean loss of its rows."""

    def __init__(self, module: LossModel) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.inner.model(x), y)


# --- pytorch/examples imagenet: the wrapper inside the model ---


def test_imagenet_wraps_features() -> None:
    """``model.features = DataParallel(model.features)``; the rest stays in the driver; names are
    checkpoints' names.
    """
    models = []
    for wrap in WRAPS:
        model = net()
        model.features = wrap(model.features)
        models.append(train(model))
    ours, theirs = models
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert "features.module.0.weight" in ours.state_dict()
    assert_same_state(ours, theirs, rtol=1e-6, atol=1e-7)


# --- checkpoints ---


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    """Saved wrapped and loaded plain, wrapped by upstream, and back; with the optimizer's state."""
    ours, theirs = (train(wrap(net())) for wrap in WRAPS)
    assert_same_state(ours, theirs, rtol=1e-6, atol=1e-7)
    file = tmp_path / "checkpoint.pt"
    torch.save({"model": ours.state_dict(), "epoch": 3}, file)
    state = torch.load(file, weights_only=True)["model"]
    assert all(name.startswith("module.") for name in state)
    fresh = oracle.DataParallel(Net(), [0, 1])
    fresh.load_state_dict(state)
    assert_same_state(fresh, ours, rtol=0, atol=0)
    plain = Net()
    plain.load_state_dict({name.removeprefix("module."): t for name, t in state.items()})
    assert_same_state(plain, ours, rtol=0, atol=0)
    again = DataParallel(Net(), TWO)
    again.module.load_state_dict(plain.state_dict())
    x, _ = data()
    again.eval()
    torch.testing.assert_close(again(x), plain.eval()(x))


def test_cyclegan_saves_through_the_cpu() -> None:
    """``torch.save(net.module.cpu().state_dict())`` between two steps, then on."""
    model = DataParallel(net(), TWO)
    train(model, 1)
    file = io.BytesIO()
    assert isinstance(model, torch.nn.DataParallel)
    torch.save(model.module.cpu().state_dict(), file)
    train(model, 1)
    reference = train(net(), 0)
    file.seek(0)
    reference.load_state_dict(torch.load(file))
    wrapped = oracle.DataParallel(reference, [0, 1])
    train(wrapped, 1)
    assert_same_state(model, wrapped, rtol=1e-6, atol=1e-7)


SAVED = """
import sys
import torch
from torch import nn

model = torch.load(sys.argv[1], weights_only=False)
assert isinstance(model, nn.DataParallel)
plain = model.module if isinstance(model, nn.DataParallel) else model
torch.save(plain.eval()(torch.load(sys.argv[2])), sys.argv[3])
assert not sys.modules["ray"].is_initialized()
"""


@pytest.mark.long
def test_a_whole_model_is_saved_and_opened_by_another_program(tmp_path: Path) -> None:
    """``torch.save(model)`` after training; the other program unwraps it, and needs no Ray to use
    what was in it.
    """
    model = DataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), TWO)
    train(model)
    whole, given, found = (str(tmp_path / name) for name in ("whole.pt", "given.pt", "found.pt"))
    torch.save(model, whole)
    x, _ = data()
    torch.save(x, given)
    subprocess.run([sys.executable, "-c", SAVED, whole, given, found], check=True, timeout=120)
    assert torch.equal(torch.load(found), model.module.eval()(x))
    again = torch.load(whole, weights_only=False)
    assert_same_state(train(again), train(model.train()), rtol=0, atol=0)


# --- torch.func: weights as an argument of the module, inside and beside the wrapper ---


class Adapting(nn.Module):
    """After MAML: a step on the chunk's own support rows, then the adapted weights' loss on its
    query rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = dict(self.net.named_parameters())
        out = torch.func.functional_call(self.net, weights, (x,))
        loss = nn.functional.cross_entropy(out, y)
        with torch.enable_grad():
            grads = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
        adapted = {
            name: weight - 0.1 * grad
            for (name, weight), grad in zip(weights.items(), grads, strict=True)
        }
        out = torch.func.functional_call(self.net, adapted, (x,))
        return nn.functional.cross_entropy(out, y, reduction="none")


class AdaptingPlain(Adapting):
    """The same for upstream's replicas, which have no parameters to name."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = {"weight": self.net.weight, "bias": self.net.bias}
        loss = nn.functional.cross_entropy(nn.functional.linear(x, **weights), y)
        grads = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
        adapted = [w - 0.1 * g for w, g in zip(weights.values(), grads, strict=True)]
        out = nn.functional.linear(x, *adapted)
        return nn.functional.cross_entropy(out, y, reduction="none")


def test_functional_call_inside_a_replica() -> None:
    """`functional_call` finds the replica's parameters by name, and second derivatives reach the
    master: upstream's replicas have none, so its program does the same by hand.
    """
    results = []
    for wrap, kind in zip(WRAPS, (Adapting, AdaptingPlain), strict=True):
        torch.manual_seed(2)
        model = wrap(kind())
        loss = model(*data(6))
        loss.sum().backward()
        results.append((model, loss))
    (ours, loss), (theirs, expected) = results
    torch.testing.assert_close(loss, expected)
    assert_same_grads(ours, theirs)


def test_functional_call_of_the_wrapped_module() -> None:
    """Gradients for each sample, of ``model.module`` in the driver, between two parallel steps."""
    model: Any = DataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), TWO)
    train(model, 1)
    x, y = data()

    def loss(weights: Any, row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model.module, weights, (row.unsqueeze(0),))
        return nn.functional.cross_entropy(out, label.unsqueeze(0))

    weights = {name: p.detach() for name, p in model.module.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    for name, parameter in model.module.named_parameters():
        torch.testing.assert_close(each[name].sum(0), parameter.grad)


# --- fastai: wrapped for each fit ---


class Learner:
    """A learner with a callback that wraps before a fit and unwraps after it."""

    def __init__(self, model: nn.Module, wrap: Callable[..., Any]) -> None:
        self.model, self.wrap = model, wrap

    def fit(self) -> None:
        self.model = self.wrap(self.model)
        if hasattr(self.model, "reset"):
            self.model.reset()
        train(self.model, 1)
        self.model = self.model.module


class Resettable(Net):
    """Counts resets."""

    resets = 0

    def reset(self) -> None:
        self.resets += 1


def test_fastai_wraps_each_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrap, patch ``reset`` onto upstream's class, fit, unwrap, three times; then the module is
    itself again.
    """

    def reset(self: Any) -> None:
        if hasattr(self.module, "reset"):
            self.module.reset()

    monkeypatch.setattr(nn.DataParallel, "reset", reset, raising=False)
    monkeypatch.setattr(oracle.DataParallel, "reset", reset, raising=False)
    learners = []
    for wrap in WRAPS:
        torch.manual_seed(1)
        learners.append(Learner(Resettable(), wrap))
    for _ in range(3):
        for learner in learners:
            learner.fit()
    assert [type(learner.model) for learner in learners] == [Resettable, Resettable]
    assert [learner.model.resets for learner in learners] == [3, 3]
    assert_same_state(learners[0].model, learners[1].model, rtol=1e-6, atol=1e-7)


# --- ultralytics, ignite: copies for an average of the weights ---


def de_parallel(model: Any) -> Any:
    """The model without its wrapper."""
    return model.module if isinstance(model, (nn.DataParallel, oracle.DataParallel)) else model


@pytest.mark.parametrize("unwrap", [True, False])
def test_ema_of_a_copy(unwrap: bool) -> None:
    """``deepcopy(de_parallel(model))`` or ``deepcopy(model)``, updated after each step, used to
    predict.
    """
    averages = []
    for wrap in WRAPS:
        model = wrap(net())
        average = copy.deepcopy(de_parallel(model) if unwrap else model).eval()
        for parameter in average.parameters():
            parameter.requires_grad_(False)
        for _ in range(3):
            train(model, 1)
            with torch.no_grad():
                own = average.state_dict()
                for name, tensor in (de_parallel(model) if unwrap else model).state_dict().items():
                    if tensor.dtype.is_floating_point:
                        own[name].mul_(0.9).add_(tensor, alpha=0.1)
        assert de_parallel(average).names is not de_parallel(model).names
        averages.append((average, average(data()[0])))
    torch.testing.assert_close(averages[0][1], averages[1][1])
    assert isinstance(averages[0][0], nn.DataParallel) is not unwrap
    assert_same_state(averages[0][0], averages[1][0], rtol=1e-6, atol=1e-7)


# --- torchmeta: parameters as an argument ---


def meta_parallel(base: Any, scatter_kwargs: Any) -> Any:
    """After torchmeta's DataParallel: `scatter` takes ``params`` out, and gives all of them to each
    replica.
    """

    class MetaParallel(base):  # type: ignore[misc]
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            kwargs = dict(kwargs)
            params = kwargs.pop("params", None)
            inputs, kwargs = scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)
            kwargs = tuple(
                dict(params=params, **(kwargs[i] if kwargs else {})) for i in range(len(inputs))
            )
            return inputs, kwargs

    return MetaParallel


class Functional(nn.Module):
    """Computes with the weights that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor, params: Any = None) -> torch.Tensor:
        return x @ (self.weight if params is None else params["weight"]).T


def test_torchmeta_parameters_as_an_argument() -> None:
    """Adapted weights that hang on the master's: gradients flow through the argument, second order
    included.
    """
    results = []
    for name, (base, ids) in BASES.items():
        scatter_kwargs = raydp_parallel.scatter_kwargs if name == "ours" else oracle.scatter_kwargs
        torch.manual_seed(2)
        module = Functional()
        model = meta_parallel(base, scatter_kwargs)(module, ids)
        x, _ = data(6)
        inner = model(x, params=None).square().mean()
        (grad,) = torch.autograd.grad(inner, [module.weight], create_graph=True)
        adapted = {"weight": module.weight - 0.1 * grad}
        model(x, params=adapted).square().mean().backward()
        results.append(module)
    torch.testing.assert_close(results[0].weight.grad, results[1].weight.grad)


# --- catalyst, ignite: kwargs passed on ---


def test_wrapping_by_keywords() -> None:
    """``DataParallel(model, **kwargs)`` with upstream's names."""
    settings = {"device_ids": TWO, "output_device": torch.device("cpu"), "dim": 0}
    assert DataParallel(net(), **settings)(data()[0]).shape == (8, 3)


def test_names_for_import() -> None:
    """Upstream's functions are there under their names, to be imported instead of
    torch.nn.parallel's.
    """
    for name in (
        "DataParallel",
        "data_parallel",
        "replicate",
        "scatter",
        "scatter_kwargs",
        "parallel_apply",
        "gather",
    ):
        assert callable(getattr(raydp_parallel, name)) and name in raydp_parallel.__all__
