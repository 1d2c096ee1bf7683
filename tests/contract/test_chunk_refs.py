"""Inputs that do not pass through the driver: `ChunkRefs`, objects that replicas get from Ray."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.nn.functional as F
from harness import assert_same_grads, carried, kill
from ray._private.worker import global_worker
from torch import Tensor, nn

from raydp_parallel import ChunkRefs, DataParallel, Executor, Options, scatter
from raydp_parallel.errors import TransferError
from raydp_parallel.functional import parallel_apply, replicate

pytestmark = pytest.mark.ray


def net() -> nn.Module:
    """A small module."""
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def put(tensor: Tensor, *sizes: int) -> list[Any]:
    """References to parts of a tensor."""
    return [ray.put(part.clone()) for part in tensor.split([*sizes])]


def released(hexes: set[bytes], collect: Callable[[], object] = gc.collect) -> bool:
    """Whether Ray comes to keep none of these objects any more; it hears of borrowers late."""
    for _ in range(2000):
        collect()
        if not hexes & global_worker.core_worker.get_all_reference_counts().keys():
            return True
        threading.Event().wait(0.01)
    return False


def test_T7_replicas_get_the_objects_themselves(executors: Any) -> None:
    """Outputs and gradients are those of the chunks."""
    plain = net()
    model = DataParallel(copy.deepcopy(plain), executor=executors(2))
    x, y = torch.randn(7, 5), torch.randn(7, 3)
    refs = put(x, 4, 3)
    for _ in range(2):
        out = model(ChunkRefs(refs))
        assert torch.equal(out, torch.cat([plain(x[:4]), plain(x[4:])]))
        F.mse_loss(out, y).backward()
        F.mse_loss(plain(x), y).backward()
    assert_same_grads(model, plain)
    assert torch.equal(ray.get(refs[0]), x[:4])


class Described(nn.Module):
    """Says what it got."""

    def forward(self, value: Any, *, extra: Any = None) -> tuple[str, Any]:
        return type(value).__name__, extra


def test_T7_objects_of_any_kind(executors: Any) -> None:
    """Dicts, arrays, tables and texts, below other arguments and by keyword."""
    pyarrow = pytest.importorskip("pyarrow")
    executor = executors(2)
    model = DataParallel(Described(), executor=executor)
    for value, name in (
        (np.arange(3), "ndarray"),
        (pyarrow.table({"x": [1, 2]}), "Table"),
        ("text", "str"),
        ({"x": 1}, "dict"),
        (None, "NoneType"),
    ):
        refs = ChunkRefs([ray.put(value), ray.put(value)])
        assert model(refs)[0] == [name] * 2
        assert model(1.5, extra={"deep": [refs]})[0] == ["float"] * 2
    values = ChunkRefs([ray.put({"x": torch.ones(2)}), ray.put({"x": torch.zeros(1)})])
    _, found = model(0, extra=[values, torch.arange(4)])
    assert torch.equal(found[0]["x"], torch.tensor([1.0, 1, 0]))
    assert torch.equal(found[1], torch.arange(4))


def column(name: str, block: Any) -> Tensor:
    """A column of a table."""
    return torch.as_tensor(np.stack(block[name].to_numpy()))


@pytest.mark.long
def test_T7_blocks_of_ray_data(executors: Any) -> None:
    """A column is the input, another one the target, of one object."""
    data = pytest.importorskip("ray.data")
    pytest.importorskip("pandas")
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    table = [{"x": row.numpy(), "y": int(label)} for row, label in zip(x, y, strict=True)]
    refs = data.from_items(table, override_num_blocks=2).to_pandas_refs()
    assert len(refs) == 2
    plain = net()
    model = DataParallel(plain, executor=executors(2)).with_loss(nn.CrossEntropyLoss())
    inputs, targets = (ChunkRefs(refs, functools.partial(column, name)) for name in "xy")
    torch.testing.assert_close(model(inputs, targets), F.cross_entropy(plain(x), y))


def test_T7_writes_stay_in_the_replica(executors: Any) -> None:
    """Also where prepare gives a tensor on Ray's own memory."""

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    model = DataParallel(Writes(), executor=executors(2))
    arrays = [np.zeros(200_000), np.zeros(3)]
    refs = [ray.put(array) for array in arrays]
    for _ in range(2):
        assert (model(ChunkRefs(refs, torch.as_tensor)) == 1).all()
    assert not any(ray.get(ref).any() for ref in refs)


@pytest.mark.filterwarnings("error")
def test_T7_prepare_runs_in_the_replica(executors: Any) -> None:
    """Without gradients, without warnings, and with the random numbers of the chunk."""
    plain = net()
    model = DataParallel(plain, executor=executors(2))
    x = torch.randn(6, 5)
    scale = torch.tensor(2.0, requires_grad=True)
    refs = [ray.put(part.numpy()) for part in x.split(3)]
    out = model(ChunkRefs(refs, lambda array: torch.as_tensor(array) * scale))
    torch.testing.assert_close(out, plain(x * 2))
    out.sum().backward()
    assert not scale.grad

    def noisy(array: Any) -> Tensor:
        return torch.as_tensor(array) + torch.rand(3, 5)

    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(model(ChunkRefs(refs, noisy)))
    assert torch.equal(*found)

    def fails(array: Any) -> Tensor:
        raise LookupError(f"no column in {array.shape}")

    text = r"in replica 0 on device cpu(.|\n)*no column in \(3, 5\)"
    with pytest.raises(LookupError, match=text):
        model(ChunkRefs(refs, fails))


def test_T7_prepare_is_that_of_this_process(
    executors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its module was loaded after the model was sent, and its file was changed since."""
    monkeypatch.syspath_prepend(tmp_path)
    model = DataParallel(net(), executor=executors(2))
    x = torch.randn(4, 5)
    refs = put(x, 2, 2)
    model(ChunkRefs(refs))
    file, text = tmp_path / "loaded_late.py", "def prepare(x):\n    return x * {}\n"
    file.write_text(text.format(2))
    late = importlib.import_module("loaded_late")
    file.write_text(text.format(3))
    expected = model.module(x * 2)
    for _ in range(2):
        torch.testing.assert_close(model(ChunkRefs(refs, late.prepare)), expected)


def test_T7_a_replay_calls_what_was_called(killable: Executor) -> None:
    """As it was then, and not as the program has changed it since."""
    model, factor, x = DataParallel(net(), executor=killable), [2.0], torch.randn(4, 5)
    plain = copy.deepcopy(model.module)

    def called(module: Any, x: Tensor) -> Tensor:
        return module(x) * factor[0]  # type: ignore[no-any-return]

    out = model.run(called, ChunkRefs(put(x, 2, 2)))
    factor[0] = 100.0
    kill(killable, 0)
    out.sum().backward()
    (plain(x) * 2).sum().backward()
    assert_same_grads(model.module, plain)


def test_T7_no_gradient_for_an_object(executors: Any) -> None:
    """Its tensors are inputs without one, also if they required it where they were made."""
    plain = net()
    model = DataParallel(plain, executor=executors(2))
    refs = [ray.put(torch.randn(2, 5).requires_grad_()) for _ in range(2)]
    x = torch.randn(4, 5, requires_grad=True)
    out = model.run(lambda inner, one, other: inner(one + other), ChunkRefs(refs), x)
    out.sum().backward()
    assert x.grad is not None and plain[0].weight.grad is not None
    frozen = DataParallel(net().requires_grad_(False), executor=executors(2))
    assert not frozen(ChunkRefs(refs)).requires_grad


@pytest.mark.long
def test_T7_fewer_objects_and_one_device(executors: Any) -> None:
    """As many chunks as objects; one object where nothing is split, or in place."""
    plain = net()
    x = torch.randn(4, 5)
    two, one = executors(2), executors(1)
    (ref,) = put(x, 4)
    for model in (DataParallel(plain, executor=two), DataParallel(plain, executor=one)):
        torch.testing.assert_close(model(ChunkRefs([ref])), plain(x))
    model = DataParallel(plain, executor=two)
    for split in (True, False):
        found = model.call("forward", ChunkRefs([ref]), split=split)
        torch.testing.assert_close(found, plain(x))
    (out,) = model.map([ChunkRefs([ref])], split=False)
    torch.testing.assert_close(out, plain(x).detach())
    torch.testing.assert_close(replicate(plain, ["cpu"])[0](ChunkRefs([ref])), plain(x))
    parts = scatter(ChunkRefs(put(x, 2, 2)), [0, 1])
    outs = parallel_apply(replicate(plain, ["cpu", "cpu"]), parts)
    torch.testing.assert_close(torch.cat(outs), plain(x))
    model.device_ids = ["cpu"]
    torch.testing.assert_close(model(ChunkRefs([ref])), plain(x))
    with pytest.raises(ValueError, match="2 objects for 1 devices"):
        model(ChunkRefs([ref, ref]))


@pytest.mark.long
def test_T7_what_is_refused(executors: Any, tmp_path: Path) -> None:
    """With an error that says what to give."""
    ref, model = ray.put(torch.ones(2, 5)), DataParallel(net(), executor=executors(2))
    with pytest.raises(ValueError, match="got none"):
        ChunkRefs([])
    with pytest.raises(TypeError, match=r"expected a ray.ObjectRef for each chunk, got Tensor for"):
        ChunkRefs([ref, torch.ones(2)])
    with pytest.raises(TypeError, match="prepare must be a function of the object, got str"):
        ChunkRefs([ref], "x")
    with pytest.raises(ValueError, match="3 objects for 2 devices"):
        model(ChunkRefs([ref] * 3))
    with pytest.raises(ValueError, match=r"different numbers of chunks.*inputs\[0\]: 1 chunk"):
        model(ChunkRefs([ref]), torch.ones(4, 5))
    with pytest.raises(ValueError, match="2 objects for a call that is not split"):
        model.call("forward", ChunkRefs([ref] * 2), split=False)
    with pytest.raises(TypeError, match="can only be an argument of a call"):
        pickle.dumps(ChunkRefs([ref]))
    weighted = DataParallel(net(), executor=executors(2), options=Options(chunk_weights=(2, 1)))
    with pytest.raises(ValueError, match="takes no sizes"):
        weighted(ChunkRefs([ref] * 2))

    def says(inner: nn.Module, x: Tensor) -> Tensor:
        (tmp_path / "ran").touch()
        return inner(x)

    weighted = DataParallel(net(), executor=executors(2), options=Options(scalars="mean"))
    with pytest.raises(ValueError, match="rows of chunks are not known"):
        weighted.run(says, ChunkRefs([ref] * 2))
    assert not (tmp_path / "ran").exists()  # before anything ran
    own = weighted.with_loss(nn.MSELoss())
    y = ChunkRefs([ray.put(torch.zeros(2, 3))] * 2)
    loss = own(ChunkRefs([ref] * 2), y)
    torch.testing.assert_close(loss, weighted.module(torch.ones(2, 5)).square().mean())
    with pytest.raises(ValueError, match="rows of chunks are not known"):
        weighted(ChunkRefs([ref] * 2))
    numbered = weighted.run(lambda inner, x, _: inner(x), ChunkRefs([ref] * 2), torch.arange(4))
    torch.testing.assert_close(numbered, weighted.module(torch.ones(4, 5)))


@ray.remote(num_cpus=0)
def failing() -> None:
    """A task of the user's."""
    raise KeyError("no such file")


@ray.remote(num_cpus=0, max_retries=0)
def crashing() -> None:
    """A task that ends its process."""
    os._exit(1)


def test_T7_objects_that_are_not_there(executors: Any) -> None:
    """A task's own error, or a lost object: both name the replica, and the next call works."""
    model = DataParallel(net(), executor=executors(2))
    good = ray.put(torch.ones(2, 5))
    with pytest.raises(KeyError, match=r"in replica 1 on device cpu(.|\\n|\n)*no such file"):
        model(ChunkRefs([good, failing.remote()]))
    cancelled = crashing.options(resources={"none": 1}).remote()  # it never begins
    ray.cancel(cancelled)
    gone = {"WorkerCrashedError": crashing.remote(), "TaskCancelledError": cancelled}
    for name, ref in gone.items():
        text = rf"in replica 0 on device cpu(.|\n)*cannot be had \({name}\)"
        with pytest.raises(TransferError, match=text):
            model(ChunkRefs([ref, good]))
    torch.testing.assert_close(model(ChunkRefs([good])), model.module(torch.ones(2, 5)))


def test_T7_objects_are_released(executors: Any) -> None:
    """After the backward that may have needed them again; before, the call holds them."""
    model = DataParallel(net(), executor=executors(2))
    refs = put(torch.randn(4, 5), 2, 2)
    hexes = {ref.hex().encode() for ref in refs}
    out = model(ChunkRefs(refs))
    del refs
    gc.collect()
    assert hexes <= global_worker.core_worker.get_all_reference_counts().keys()
    out.sum().backward()
    assert released(hexes)
    refs = put(torch.randn(4, 5), 2, 2)
    hexes = {ref.hex().encode() for ref in refs}
    with torch.no_grad():
        model(ChunkRefs(refs))
    with contextlib.suppress(TypeError):
        model(ChunkRefs(refs), "one too many")
    del refs
    assert released(hexes)


class Held:
    """An object that can be counted."""


class Unloadable:
    """An argument that only this process can load."""

    def __reduce__(self) -> Any:
        return load_here, (os.getpid(),)


def load_here(pid: int) -> Unloadable:
    assert pid == os.getpid(), "not here"
    return Unloadable()


def test_T7_a_call_whose_other_arguments_fail_keeps_no_object(executors: Any) -> None:
    """Neither do those beside an object that is not there."""
    model = DataParallel(nn.Identity(), executor=executors(2))
    held = [ray.put(Held()) for _ in range(2)]
    with pytest.raises(TransferError, match="not here"):
        model(ChunkRefs(held), Unloadable())
    with pytest.raises(KeyError, match="no such file"):
        model(ChunkRefs([failing.remote()] * 2), ChunkRefs(held))

    def count(_net: nn.Module, x: Tensor) -> Tensor:
        gc.collect()  # an exception's traceback holds a circle
        return x + sum(type(found).__name__ == "Held" for found in gc.get_objects())

    assert model.run(count, torch.zeros(2)).tolist() == [0.0, 0.0]


def test_T7_the_bytes_that_pass_through_the_driver(executors: Any) -> None:
    """All of 8 MB with tensors, nearly none with references."""
    x, y = torch.randn(2000, 1000), torch.randint(0, 3, (2000,))
    refs = put(x, 1000, 1000), put(y, 1000, 1000)  # made by tasks or by Ray Data, in earnest
    net = nn.Linear(1000, 3)
    model = DataParallel(net, executor=executors(2)).with_loss(nn.CrossEntropyLoss())
    losses, found = [], []
    for inputs in ((x, y), tuple(map(ChunkRefs, refs))):
        losses.append(model(*inputs).detach())  # weights travel
        before = carried(model)
        model(*inputs)
        found.append(carried(model) - before)
    assert found[0] > 8_000_000 > 10_000 > found[1]
    torch.testing.assert_close(*losses)
