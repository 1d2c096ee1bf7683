"""The ways of bytes among the driver and replicas with GPUs: values, memory, counts, faults."""

from __future__ import annotations

import gc
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import on_gpus
import oracle
import pytest
import torch
from harness import made_of, printed
from mortal import Everything, Mortal, arm, armed, rows, same, state, step
from torch import nn

from benchmarks import gpu_host
from raydp_parallel import DataParallel, Executor, Options, TransferError, convert_sync_batchnorm
from raydp_parallel.devices import cuda, memory
from raydp_parallel.driver import groups
from raydp_parallel.wire import group, trial
from raydp_parallel.wire.channel import Channel

if on_gpus.asked() == "cpu":
    pytest.skip("these are among stand-in GPUs: --device cuda", allow_module_level=True)

import standin

GPU = torch.device(on_gpus.asked())
SHARED = [GPU.index]  # by the driver and a replica
HOST, IPC = (Options(metrics=False, gpu_paths=ways) for ways in (("host",), ("host", "ipc")))
of_driver = pytest.mark.skipif(
    on_gpus.asked() != "cuda:0", reason="an only replica would not share the driver's GPU"
)


def net(width: int = 8) -> nn.Module:
    """Layers with batch norm."""
    layers = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3)]
    return nn.Sequential(*layers).double()


def plain_of(module: nn.Module) -> nn.Module:
    """A copy that knows nothing of replicas."""
    found = net()
    found.load_state_dict(module.state_dict())
    return found


def train(model: nn.Module, x: torch.Tensor, steps: int = 3) -> Iterator[float]:
    """Train, and yield each loss."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.fixture
def x() -> torch.Tensor:
    """A batch."""
    return torch.randn(8, 8, dtype=torch.double)


@made_of(parts=lambda: nn.ModuleList([nn.Linear(6, 3) for _ in range(2)]))
def heads(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Run the part of the chunk, so that chunks have gradients of other parameters."""
    return net.parts[int(x[0, 0])](x[:, 1:])  # type: ignore[no-any-return]


def trained(executor: Executor, how: str, folder: Path, plan: list[str]) -> list[torch.Tensor]:
    """Train, with a death in some steps; returns losses and the final state."""
    torch.manual_seed(7)
    count = len(executor.device_ids)
    net = heads() if how == "differing" else Mortal(Everything(), folder)
    model = DataParallel(net.to(oracle.place), executor=executor)
    optimizer: Any = torch.optim.Adam(model.parameters(), 0.01)
    if how == "resident":
        optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
    found = []
    for number in range(6):
        executor.grow()
        arm(folder, *plan[number - 1 : number] if number else ())  # the first step has the trial
        few = how == "smaller" and number % 2 == 1
        x = rows(count - few, number, 2).requires_grad_()
        found.append(step(model, optimizer, x))
        found.append(x.grad)
        model.sync()
        assert not armed(folder)
    return [*found, *state(model)]


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("", []),
        ("", ["full broadcast 1", "full alltoall_base 0"]),
        pytest.param(
            "",
            ["broadcast 1", "alltoall_base 0", "late alltoall_base 1", "trial 0"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "resident", ["_allgather_base 1", "late alltoall_base 0"], marks=pytest.mark.long
        ),
        ("differing", []),
        ("smaller", []),
        ("permuted", []),
        ("hangs", []),
        ("stalls", []),
    ],
)
def test_weights_and_gradients_go_from_gpu_to_gpu(
    how: str, plan: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NCCL, to the bit as by the host, also when members die in an exchange; and not where its
    trial fails, as with places in the wrong order (N4), nor in a smaller batch: it takes gigabytes
    for each set of GPUs.
    """
    monkeypatch.setenv("NCCL_STANDIN", how)
    monkeypatch.setenv("NCCL_STANDIN_FATES", str(tmp_path))
    by_nccl = how not in ("permuted", "hangs", "stalls")
    monkeypatch.setattr(groups, "_GRACE", 1.0)
    if how in ("hangs", "stalls"):
        monkeypatch.setattr(groups, "_TRIAL", 1.0)
    found = []
    for ways in (("host",), ("host", "nccl")):
        ids = [0, 1, 2][: 2 + (how == "smaller")]
        with Executor(ids, options=Options(gpu_paths=ways)) as executor:
            found.append(trained(executor, how, tmp_path, plan if "nccl" in ways else []))
            stats = executor.stats()
            made = [one.nccl for one in executor.dispatcher.groups.values()]
    assert same(*found)
    assert stats.link == ("nccl + windows" if by_nccl else "windows")
    assert sum(made) == by_nccl
    if not how and not plan:
        root, other = stats.replicas
        assert other.bytes_in == root.bytes_in  # weights lie in a window, of which one reads
        assert other.bytes_out < root.bytes_out / 10


def test_nccl_is_for_all_gpus_and_for_whole_cards() -> None:
    """It takes gigabytes for each set of GPUs, and refuses a second part of a card."""
    options = Options(gpu_paths=("nccl",), metrics=False)
    with mock.patch.object(groups, "join"), Executor([0, 1, 2], options=options) as executor:
        slots, dispatcher = executor.slots([0, 1, 2]), executor.dispatcher
        assert groups.direct(dispatcher, slots, lambda: 1 << 20)
        assert not groups.direct(dispatcher, slots[:2], lambda: 1 << 20)
        slots[0].hello = slots[0].hello._replace(gpu="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
        assert not groups.direct(dispatcher, slots, lambda: 1 << 20)


@pytest.fixture
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What goes wrong in the driver, and in replicas that start."""
    monkeypatch.setenv("NCCL_STANDIN", request.param)
    memory._may_register.cache_clear()
    yield request.param
    memory._may_register.cache_clear()


@of_driver
@pytest.mark.parametrize("ways", [HOST, IPC])
@pytest.mark.parametrize("fault", ["", "lossy", "unregistered"], indirect=True)
def test_training_has_the_values_of_the_plain_module(
    x: torch.Tensor, fault: str, ways: Options
) -> None:
    """Also with staging where memory is not registered, and after a trial of IPC that fails, which
    draws no random numbers. Nothing crosses to the host by IPC.
    """
    module = net()
    plain, drawn = plain_of(module), torch.cuda.get_rng_state(GPU)
    with Executor(SHARED, options=ways) as executor:
        link = executor.stats().link
        assert link == ("ipc" if ways is IPC and fault != "lossy" else "windows")
        assert torch.equal(torch.cuda.get_rng_state(GPU), drawn)
        model = DataParallel(module, executor=executor)
        with torch.inference_mode():  # until nothing new is made: training goes on with that
            for _ in range(3):
                model.eval()(x)
        losses = train(model.train(), x, 9)
        found = [next(losses)]  # it looks whether weights are still those from before
        before = standin.number("crossings")
        found += losses
        assert (standin.number("crossings") == before) == (link == "ipc")
    assert found == pytest.approx([*train(plain, x, 9)], rel=1e-9)


@of_driver
@pytest.mark.parametrize("ways", [HOST, IPC])
def test_memory_of_windows_ends_with_their_readers(x: torch.Tensor, ways: Options) -> None:
    """Torch counts them, and one that was killed does not count itself out."""
    module, taken = net(), []
    for _ in range(3):
        with Executor(SHARED, options=ways) as executor, torch.no_grad():
            for rows in (8, 8, 800):  # a window that grows
                DataParallel(module, executor=executor)(x.repeat(rows, 1))
        del executor
        gc.collect()
        torch.cuda.ipc_collect()
        taken.append(torch.cuda.memory_allocated(GPU))
    assert taken[1] == taken[2]


def used(*_: Any) -> torch.Tensor:
    """Tell the bytes in use on each GPU that this process sees, and where it has a context."""
    import standin

    gpus = range(torch.cuda.device_count())
    return torch.tensor([[standin.number(n, gpu) for n in ("live", "started") for gpu in gpus]])


@pytest.mark.long
@pytest.mark.parametrize(("ways", "inside"), [(HOST, True), (IPC, False)])
def test_300_steps_take_no_memory_and_no_context_elsewhere(
    ways: Options, inside: bool, x: torch.Tensor
) -> None:
    """In the driver, and in replicas, which see no GPU but their own."""
    last, seen = on_gpus.GPUS - 1, []
    with Executor([0, last], options=ways) as executor:
        model = DataParallel(net(), executor=executor)
        make = model.optimizer if inside else lambda kind: kind(model.parameters())
        optimizer = make(torch.optim.Adam)
        for step in range(301):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step in (20, 21, 22, 298, 299, 300):
                gc.collect()
                here, there = used(), model.run(used, x[:2], gather=False)
                seen.append([row.cpu()[0] for row in (here, *there)])
                del here, there
    # Some of the last step's may be on its way back.
    parts = seen[:3], seen[3:]
    first, then = (
        [torch.stack(o).amin(0).tolist() for o in zip(*part, strict=True)] for part in parts
    )
    assert first == then
    driver, *replicas = [row[len(row) // 2 :] for row in first]
    assert replicas == [[1], [1]] and not any(driver[last:])


def test_a_module_moves_to_a_gpu_and_back(x: torch.Tensor) -> None:
    """Its buffers are other tensors then, and their last contents lie on the other device."""
    module = net().eval()
    with Executor([0], options=HOST) as executor:
        model = DataParallel(module, executor=executor)
        right = model(x).cpu()
        for place in ("cpu", oracle.place):
            module.to(place)
            torch.testing.assert_close(model(x.to(place)).cpu(), right)


@of_driver
def test_a_gpu_is_shared_if_the_program_uses_it() -> None:
    """Not because it is the current one."""
    kept = torch.ones(1, device="cuda:6")
    assert cuda.own_gpu("GPU-7") is None
    assert cuda.own_gpu("GPU-6") == kept.device


@pytest.mark.skipif(on_gpus.asked() != "cuda", reason="the driver uses a GPU")
def test_a_driver_that_uses_no_gpu_does_not_start_cuda(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has some, which replicas use."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: on_gpus.GPUS)
    module = net().eval()
    right = [*train(plain_of(module).eval(), x)]
    with Executor([0, 1, 2]) as executor:
        assert [*train(DataParallel(module, executor=executor), x)] == pytest.approx(right)
    assert not torch.cuda.is_initialized()


@of_driver
@pytest.mark.parametrize("ways", [HOST, IPC])
def test_a_forward_on_a_stream_of_its_own_and_a_backward_outside(
    x: torch.Tensor, ways: Options
) -> None:
    """Torch runs outputs' nodes on the stream of the forward, and the trip's, which is on the CPU,
    on the caller's: gradients of the one are read on the other.
    """
    module = net().eval()
    plain, side = plain_of(module).eval(), torch.cuda.Stream(GPU)
    side.wait_stream(torch.cuda.current_stream(GPU))
    with Executor([*SHARED, *SHARED], options=ways) as executor:
        model = DataParallel(module, executor=executor)
        for _ in range(3):
            with torch.cuda.stream(side):
                loss = model(x).square().mean()
            loss.backward()
            plain(x).square().mean().backward()
            for a, b in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)


@made_of(weight=lambda: nn.Parameter(torch.full((1 << 12,), 2.0)))
def keeping(net: Any, x: torch.Tensor | str) -> Any:
    """Compute, keep the weight in the process without a word, or give what was kept."""
    if isinstance(x, torch.Tensor):
        return x * net.weight
    if x == "keep":
        torch.kept = net.weight.detach().clone()  # type: ignore[attr-defined]
        return None
    return torch.kept  # type: ignore[attr-defined]


@of_driver
@pytest.mark.parametrize("places", [[0], [2]])
def test_windows_are_written_once_they_were_read(places: list[int]) -> None:
    """By the driver's other streams, by a replica that says nothing, and as an executor ends."""
    module, sides = keeping(), [torch.cuda.Stream(GPU) for _ in range(4)]
    with Executor(places, options=HOST) as executor, torch.no_grad():
        model = DataParallel(module, executor=executor)
        rows = [torch.full((1, 1 << 12), float(n)) for n in range(4)]
        torch.cuda.synchronize(GPU)
        found = []
        for row, side in zip(rows, sides, strict=True):
            with torch.cuda.stream(side):
                found.append(model(row))
        for n in range(3):
            module.weight.fill_(n)
            assert model("keep") is None
            module.weight.fill_(n + 10)
            found.append(model(rows[1])) if n == 2 else model("keep")
        kept = model("kept")
        last = model(rows[2])
    torch.cuda.synchronize(GPU)
    assert [t.unique().tolist() for t in found] == [[0.0], [2.0], [4.0], [6.0], [12.0]]
    assert (kept.unique().tolist(), last.unique().tolist()) == ([2.0], [24.0])


@of_driver
@pytest.mark.parametrize("begins", [False, True])
def test_a_kernel_that_fails_costs_a_replica_and_says_why(begins: bool) -> None:
    """It computes nothing more; another one takes its place."""
    with Executor([1, 2], options=HOST) as executor, torch.no_grad():
        model = DataParallel(nn.Embedding(4, 2), executor=executor)
        right = torch.arange(4)
        if not begins:
            model(right)
        with pytest.raises(RuntimeError, match="device-side assert"):
            model(right + 2)
        assert torch.equal(model(right), model.module(right))


def ends() -> Any:
    """Two ends of a channel."""
    return map(Channel, socket.socketpair())


def test_nobody_answers_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is waited for for a while."""
    monkeypatch.setattr(trial, "_PATIENCE", 0.01)
    ours, _theirs = ends()
    with pytest.raises(TimeoutError):
        trial.try_ipc(ours, torch.device("cpu"))


@of_driver
@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("ways", [HOST, IPC])
def test_messages_carry_dtypes_of_which_cuda_copies_no_row(
    ways: Options, dtype: torch.dtype
) -> None:
    """Alone and beside others, by both ways."""
    bits = torch.arange(64, dtype=torch.uint8)
    with Executor(SHARED, options=ways) as executor, torch.no_grad():
        model = DataParallel(nn.Identity(), executor=executor)
        for row in ([bits.view(dtype)], [bits.view(dtype), bits, bits.view(torch.float32)]):
            for got, sent in zip(model(row), row, strict=True):
                assert got.device == GPU
                assert torch.equal(got.cpu().view(torch.uint8), sent.cpu().view(torch.uint8))


@of_driver
@pytest.mark.parametrize("fault", ["unregistered"], indirect=True)
def test_staging_is_written_once_it_was_read(fault: str) -> None:
    """By whatever stream did that; and each thread has its own."""
    ours, theirs = ends()
    with torch.cuda.device(GPU):
        side, found = torch.cuda.Stream(), []
        for n, stream in enumerate([side, torch.cuda.current_stream(), side]):
            ours.send([torch.full((4,), n, device="cpu")])
            with torch.cuda.stream(stream):
                found += theirs.receive(device=GPU)
        side.synchronize()
        torch.cuda.synchronize()
    assert [t.tolist() for t in found] == [[n] * 4 for n in range(3)]
    places: list[Any] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: places.append(memory._staging(GPU, "up", 8)))
        thread.start()
        thread.join()
    assert places[0].data_ptr() != places[1].data_ptr()


@of_driver
def test_layers_that_exchange_do_not_wait_for_the_gpu() -> None:
    """The host knows the number of all values from the meeting."""
    alone = mock.Mock(size=1, swap=lambda rows, *_: rows, numbers=[8])
    layer, given = convert_sync_batchnorm(nn.BatchNorm1d(3)).to(GPU), torch.randn(8, 3)
    waits = standin.number("waits")
    with mock.patch.object(group, "current", alone):
        layer(given.requires_grad_()).sum().backward()
    assert standin.number("waits") == waits


@of_driver
def test_more_replicas_need_no_more_memory() -> None:
    """All have the weights from one window, and the driver adds gradients as they come."""
    module, given, most = net(256), torch.randn(20, 256, dtype=torch.double), []
    weights = sum(p.nbytes for p in module.parameters())
    for places in ([2, 3, 4], [2, 3, 4, 5, 6]):
        with Executor(places, options=HOST) as executor:
            torch.cuda.reset_peak_memory_stats(GPU)
            [*train(DataParallel(module, executor=executor), given)]
            most.append(torch.cuda.max_memory_allocated(GPU))
            assert max(row.bytes_in for row in executor.stats().replicas) < weights
    assert most[1] < most[0] + weights / 2


@of_driver
@pytest.mark.parametrize("told", [True, False])
def test_windows_are_no_segments_that_grow(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers refuse to share these; the program's memory stays as it wants it. IPC is left out
    where the environment does not tell.
    """
    grows = "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", grows if told else "")
    torch.cuda.memory._set_allocator_settings(grows)
    own = torch.ones(1)
    with Executor(SHARED, options=IPC) as executor:
        link = executor.stats().link
    after = torch.ones(1)
    torch.cuda.memory._set_allocator_settings("")
    assert link == ("ipc" if told else "windows")
    for one in (own, after):
        with pytest.raises(RuntimeError, match="not permitted"):
            one.untyped_storage()._share_cuda_()


@of_driver
def test_a_step_asks_the_host_for_little() -> None:
    """Counts for ResNet-50's tensors, which no machine changes: those of the page."""
    found, page = gpu_host.counted("ipc"), Path(__file__).parents[2] / "docs" / "gpu.md"
    for side in gpu_host.WAITS:
        counts = [found[f"{side} {kind}"] for kind in ("waits", "launches", "crossings")]
        assert "| ipc, {} | {} | {} | {} |".format(side, *counts) in page.read_text()
    calls = sum(found[f"{side} Python calls"] for side in gpu_host.WAITS)
    assert calls <= gpu_host.LIMITS["Python calls"]


@of_driver
def test_edits_of_data_are_found_with_one_wait(x: torch.Tensor) -> None:
    """Contents of what was not sent are compared on the GPU."""
    module = net().eval()
    with Executor(SHARED, options=HOST) as executor, torch.no_grad():
        model = DataParallel(module, executor=executor)
        for _ in range(9):
            before = model(x)
        waits = standin.number("waits")
        model(x)
        assert standin.number("waits") - waits == 2  # for the message, and for the comparison
        module.get_parameter("0.weight").data.mul_(2)
        assert not torch.equal(model(x), before)
        assert torch.equal(model(x), module(x))


@of_driver
@pytest.mark.parametrize("ways", [HOST, IPC])
@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_a_step_with_wrong_bytes_has_no_effect(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, lost: int, ways: Options
) -> None:
    """Whichever of its messages that was, sent or received; the next step is right."""
    monkeypatch.setattr(trial, "SIZES", [1 << 12])  # only the first messages have sums
    module = net()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    plain, sums, right = plain_of(module), [], memory.checksum
    with Executor(SHARED, options=ways) as executor:
        model = DataParallel(module, executor=executor)

        def total(run: torch.Tensor) -> int:
            sums.append(right(run) + (len(sums) == lost - 1))
            return sums[-1]

        monkeypatch.setattr(memory, "checksum", total)
        with pytest.raises(TransferError, match="ipc" if ways is IPC else "host"):
            [*train(model, x, steps=1)]
        assert all(p.grad is None for p in module.parameters())
        monkeypatch.setattr(memory, "checksum", right)
        for name, value in module.named_parameters():
            assert torch.equal(value, before[name])
        module.load_state_dict(before)
        assert [*train(model, x)] == pytest.approx([*train(plain, x)], rel=1e-12)


def test_a_replica_that_cannot_read_a_step_has_not_made_it(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an optimizer in the replicas; the step can be repeated."""
    module = net()
    plain, right = plain_of(module), memory.checksum
    with Executor([0], options=HOST) as executor:
        model = DataParallel(module, executor=executor)
        inside = model.optimizer(torch.optim.SGD, lr=0.1)
        own = torch.optim.SGD(plain.parameters(), 0.1)
        for one in (model, plain):
            one(x).square().mean().backward()
        inside.clip_grad_norm_(0.1)
        before = [p.clone() for p in module.parameters()]
        monkeypatch.setattr(memory, "checksum", lambda run: right(run) + 1)
        inside.step()
        with pytest.raises(TransferError):
            model.state_dict()
        monkeypatch.setattr(memory, "checksum", right)
        assert all(map(torch.equal, module.parameters(), before))
        inside.step()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        own.step()
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b)


@of_driver
@pytest.mark.long
def test_no_row_of_the_benchmark_fails(tmp_path: Path) -> None:
    """Of the one for a GPU, on two stand-ins."""
    printed("-m", "benchmarks.on_gpu", "--out", str(tmp_path / "rows"))
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    assert len([row for row in rows if row["deviation"] < 1e-6]) == len(rows) > 5
