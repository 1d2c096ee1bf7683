"""The CUDA code on a fake GPU: it has never been seen on a real one."""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import fake_nccl
import harness
import oracle
import pytest
import torch
from fake_gpu import FakeGpus, installed, near_replicas
from mortal import arm
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks import gpu_host, on_gpu
from raydp_parallel import DataParallel, Executor, Options, convert_sync_batchnorm
from raydp_parallel.cluster import ray_api
from raydp_parallel.devices import cuda, memory
from raydp_parallel.driver import groups
from raydp_parallel.errors import TransferError
from raydp_parallel.wire import codec, group, trial
from raydp_parallel.wire.channel import Channel
from raydp_parallel.wire.messages import ExchangeRequest
from raydp_parallel.wire.windows import GpuWindow

HERE = Options(metrics=False, gpu_paths=("host",))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    """Six GPUs, of which replicas in this process have one each."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")  # so that it is unset again
    with installed(6) as found:
        near_replicas(found, monkeypatch)
        yield found


def net(width: int = 8, layers: int = 2) -> nn.Module:
    """Layers with batch norm."""
    parts = [
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
        for _ in range(layers)
    ]
    return nn.Sequential(*parts, nn.Linear(width, 3)).double()


def train(model: nn.Module, x: torch.Tensor, steps: int = 3) -> Iterator[float]:
    """Train, and yield each loss."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.inference_mode()
def evaluated(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Evaluate more often than it takes until nothing new is made: training goes on with that."""
    for _ in range(3):
        model(x)
    return model


@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("registers", [True, False])
def test_training_has_the_values_of_cpus(gpus: FakeGpus, home: str, registers: bool) -> None:
    """By registered windows and by staging, for a driver with a GPU and for one without."""
    gpus.registers = registers
    own, other = net().to(home), net()
    other.load_state_dict({k: v.cpu() for k, v in own.state_dict().items()})
    x = torch.randn(8, 8, dtype=torch.double)
    with Executor([0, 1], options=HERE) as executor:
        model = evaluated(DataParallel(own, executor=executor), x.to(home))
        losses = [*train(model, x.to(home))]
        weight: Any = own.get_parameter("0.0.weight")
        assert weight.grad.device == weight.device
        assert weight.device.type == home
    upstream = oracle.DataParallel(other, [0, 1])
    with torch.no_grad():  # upstream's threads are not in inference mode, and fail
        for _ in range(3):
            upstream(x)
    assert losses == pytest.approx([*train(upstream, x)], rel=1e-12)
    for a, b in zip(own.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_a_module_moves_to_a_gpu_and_back(gpus: FakeGpus) -> None:
    """Its buffers are other tensors then, and their last contents lie on the other device."""
    module, x = net().eval(), torch.randn(8, 8, dtype=torch.double)
    with Executor([0], options=HERE) as executor:
        model = DataParallel(module, executor=executor)
        right = model(x)
        for place in ("cuda", "cpu"):
            module.to(place)
            torch.testing.assert_close(model(x.to(place)).cpu(), right)


def test_a_replica_with_a_gpu_copies_with_several_threads(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sets one where no CPU is booked (N3)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cuda, "cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert cuda.take_given("gpu", ["1"]) == torch.device("cuda", 0)
    assert torch.get_num_threads() == 4
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("kind", ["CUDA", "HIP"])
@pytest.mark.parametrize(("visible", "index"), [("", 1), ("5,1", 1), ("1,5", 0)])
def test_gpus_stay_visible_if_the_user_says_so(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, visible: str, index: int, kind: str
) -> None:
    """As Ray's own variable for this kind of GPU asks for (N5); a CPU replica sees none."""
    monkeypatch.setattr(torch.version, "hip", None if kind == "CUDA" else "6.4")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv(f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES", "1")
    monkeypatch.setenv(f"{kind}_VISIBLE_DEVICES", visible)
    given: Any = cuda.take_given("gpu", ["1"])
    assert given == torch.device("cuda", index)
    assert os.environ[f"{kind}_VISIBLE_DEVICES"] == visible
    assert cuda.take_given("cpu", []).type == "cpu"
    assert os.environ[f"{kind}_VISIBLE_DEVICES"] == ("" if kind == "CUDA" else "-1")


def test_a_gpu_is_shared_if_the_program_uses_it(gpus: FakeGpus) -> None:
    """Not because it is the current one."""
    kept = torch.ones(1).cuda(1)
    assert cuda.own_gpu("GPU-0") is None
    assert cuda.own_gpu("GPU-1") == kept.device


def test_a_shared_gpu_carries_all_bytes(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing crosses to the host, and the values are those of host memory."""
    x, losses, moved = torch.randn(8, 8, dtype=torch.double).cuda(), [], []
    for ipc in (True, False):
        near_replicas(gpus, monkeypatch, ipc)
        torch.manual_seed(0)
        with Executor([0, 0], options=HERE) as executor:
            assert executor.stats().link == ("ipc" if ipc else "windows")
            model = evaluated(DataParallel(net().cuda(), executor=executor), x)
            steps = train(model, x, steps=12)
            losses.append([next(steps)])  # it looks whether weights are still those from before
            gpus.counts.clear()
            losses[-1] += steps
            moved.append(gpus.counts["driver crossings"])
    assert losses[0] == losses[1]
    assert moved[0] == 0 < moved[1]


def test_a_window_is_waited_for(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads it before finds other bytes."""
    near_replicas(gpus, monkeypatch, ipc=True)
    x = torch.randn(8, 8, dtype=torch.double).cuda()
    with Executor([0], options=HERE) as executor, torch.no_grad():
        model = DataParallel(net().cuda(), executor=executor)
        right = [model(x) for _ in range(9)][-1]
        monkeypatch.setattr(gpus, "wait", lambda *_: None)
        assert not torch.equal(model(x + 1), right)


@pytest.mark.parametrize("ipc", [True, False])
def test_a_forward_on_a_stream_of_its_own_and_a_backward_outside(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, ipc: bool
) -> None:
    """Torch runs outputs' nodes on the stream of the forward, and the trip's, which is on the CPU,
    on the caller's: gradients of the one are read on the other.
    """
    near_replicas(gpus, monkeypatch, ipc)
    module, plain = net().cuda().eval(), net().cuda().eval()
    plain.load_state_dict(module.state_dict())
    x, side = torch.randn(8, 8, dtype=torch.double).cuda(), torch.cuda.Stream()
    with Executor([0, 0], options=HERE) as executor:
        model = DataParallel(module, executor=executor)
        for _ in range(3):
            with torch.cuda.stream(side):
                loss = model(x).square().mean()
            loss.backward()
            plain(x).square().mean().backward()
            for a, b in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)


def answered(gpus: FakeGpus) -> Channel:
    """The driver's end; at the other one a replica answers trials, in another thread."""
    ours, theirs = (Channel(end, summed=True) for end in socket.socketpair())
    gpu = torch.device("cuda", 0)

    def serve() -> None:
        gpus.side = "replica"
        with (
            gpus,
            contextlib.suppress(EOFError, OSError, TransferError),
            contextlib.closing(theirs),
        ):
            while True:
                theirs.send(trial.answer(theirs, theirs.receive(device=gpu), gpu))

    threading.Thread(target=serve, daemon=True).start()
    return ours


def test_the_trial_and_what_it_finds(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes where bytes arrive, and fails where they do not, or where nobody answers. The
    program's random numbers stay as they were.
    """
    monkeypatch.setattr(trial, "SIZES", [1 << 16, 1 << 20])
    monkeypatch.setattr(trial, "_PRODUCTS", 1)
    gpu, before = torch.device("cuda", 0), torch.get_rng_state()  # the GPU's, too, on the fake
    taken = gpus.memories[0].taken
    ours = answered(gpus)
    assert memory._may_register(gpu)
    trial.try_ipc(ours, gpu)
    assert torch.equal(torch.get_rng_state(), before)
    assert gpus.memories[0].taken == taken
    ours.close()
    gpus.lossy = True
    ours = answered(gpus)
    with pytest.raises(EOFError):
        trial.try_ipc(ours, gpu)
    ours.close()
    monkeypatch.setattr(trial, "_PATIENCE", 0.01)
    silent, _ = (Channel(end) for end in socket.socketpair())
    with pytest.raises(TimeoutError):
        trial.try_ipc(silent, gpu)


def test_other_bytes_than_were_sent_are_told(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sums beside the first messages, with the way's name."""
    ours, theirs = (Channel(end, summed=True) for end in socket.socketpair())
    gpu = torch.device("cuda", 0)
    for way in ("host", "ipc"):
        ours.send([torch.arange(8).cuda()])
        next(iter(ours._out.values())).memory[3] = 7
        with pytest.raises(TransferError, match=way):
            theirs.receive(device=gpu)
        ours._out.clear()
        ours.ipc = gpu


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex32, torch.float8_e8m0fnu])
def test_messages_carry_dtypes_of_which_cuda_copies_no_row(
    gpus: FakeGpus, dtype: torch.dtype
) -> None:
    """Alone and beside others, by both ways."""
    ours, theirs = (Channel(end) for end in socket.socketpair())
    gpu, bits = torch.device("cuda", 0), torch.arange(64, dtype=torch.uint8)
    for way in (None, gpu):
        ours.ipc = way
        for row in ([bits.view(dtype)], [bits.view(dtype), bits, bits.view(torch.float32)]):
            ours.send([t.cuda() for t in row])
            for got, sent in zip(theirs.receive(device=gpu), row, strict=True):
                assert torch.equal(got.cpu().view(torch.uint8), sent.view(torch.uint8))


def test_staging_is_written_once_it_was_read(gpus: FakeGpus) -> None:
    """By whatever stream did that; and each thread has its own."""
    gpus.registers = False
    ours, theirs = (Channel(end) for end in socket.socketpair())
    gpu, side, found = torch.device("cuda", 0), torch.cuda.Stream(), []
    for n, stream in enumerate([side, torch.cuda.current_stream(), side]):
        ours.send([torch.full((4,), n)])
        with torch.cuda.stream(stream):
            found += theirs.receive(device=gpu)
    side.synchronize()
    assert not gpus.torn
    assert [t.tolist() for t in found] == [[n] * 4 for n in range(3)]
    places = []

    def place() -> None:
        with gpus:
            places.append(memory._staging(gpu, "up", 8))

    threads = [threading.Thread(target=place), threading.Thread(target=place)]
    for thread in threads:
        thread.start()
        thread.join()
    assert places[0].data_ptr() != places[1].data_ptr()


def test_an_export_is_opened_once(gpus: FakeGpus) -> None:
    """Torch's counts of readers go below zero otherwise (N10)."""
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.ipc = gpu = torch.device("cuda", 0)
    for n in range(3):
        ours.send([torch.full((4,), n).cuda()])
        assert theirs.receive(device=gpu)[0].tolist() == [n] * 4
    (window,) = ours._out.values()
    with pytest.raises(RuntimeError, match="opened before"):
        GpuWindow(window.size, gpu, window.export)


def test_without_a_gpu_cuda_is_not_started() -> None:
    """By the import, or by replicas on CPUs."""
    code = """
import forked
forked.start()
forked.use(True)
import raydp_parallel, torch
torch.cuda._lazy_init = None
model = raydp_parallel.DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
model(torch.ones(4, 2)).sum().backward()
"""
    harness.printed("-c", code)


def printed(script: str, *arguments: str) -> list[str]:
    """Return the last four lines that a script prints, whose replicas are processes with GPUs."""
    path = Path(__file__).parents[1] / "support" / script
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    lines = [line for line in done.stdout.splitlines() if "(raylet)" not in line]  # may come late
    assert lines[-1] == "right", done.stdout + done.stderr
    return lines[-4:]


@pytest.mark.long
@pytest.mark.parametrize("how", ["", "lossy"])
def test_replicas_in_processes_of_their_own(how: str) -> None:
    """One of them shares the driver's GPU; it is started again without that if the trial fails."""
    *_, link, _ = printed("gpu_script.py", how)
    assert link == ("link: windows" if how else "link: ipc + windows")


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("", []),
        ("", ["broadcast:1", "alltoall_base:0", "late:alltoall_base:1", "trial:0"]),
        ("", ["full:broadcast:1", "full:alltoall_base:0"]),
        ("resident", ["_allgather_base:1", "late:alltoall_base:0"]),
        ("differing", []),
        ("permuted", []),
        ("hangs", []),
        ("stalls", []),
    ],
)
def test_weights_and_gradients_go_from_gpu_to_gpu(how: str, plan: list[str]) -> None:
    """By NCCL, to the bit as by the host, also when members die in an exchange; and not where its
    trial fails, as with places in the wrong order (N4).
    """
    said, link, sizes, _ = printed("nccl_script.py", how, "2", *plan)
    by_host = how in ("permuted", "hangs", "stalls")
    assert link == ("link: windows" if by_host else "link: nccl + windows")
    if not how and not plan:
        assert "go by NCCL" in said
        (near_in, near_out), (far_in, far_out) = ast.literal_eval(sizes.removeprefix("bytes: "))
        assert far_in == near_in  # weights lie in a window, of which only the root reads
        assert far_out < near_out / 10


@pytest.mark.long
def test_a_smaller_batch_makes_no_group_of_its_own() -> None:
    """NCCL takes gigabytes for each."""
    groups, link, *_ = printed("nccl_script.py", "smaller", "3")
    assert (groups, link) == ("groups: 1", "link: nccl + windows")


def test_nccl_is_for_all_gpus_and_for_whole_cards(gpus: FakeGpus) -> None:
    """It takes gigabytes for each set of GPUs, and refuses a second part of a card."""
    options = Options(gpu_paths=("nccl",), metrics=False)
    with mock.patch.object(groups, "join"), Executor([0, 1, 2], options=options) as executor:
        slots = executor.slots([0, 1, 2])
        assert groups.direct(executor, slots, lambda: 1 << 20)
        assert not groups.direct(executor, slots[:2], lambda: 1 << 20)
        client: Any = slots[0].client
        client.hello = client.hello._replace(gpu="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
        assert not groups.direct(executor, slots, lambda: 1 << 20)


def test_a_member_that_fails_in_nccl_says_that_it_leaves(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing else tells the other one, which would wait for minutes."""
    fake, store, ranks = fake_nccl.ProcessGroupNCCL, group.open_store(2, None), (0, 1)
    monkeypatch.setattr(group.dist, "ProcessGroupNCCL", fake, raising=False)
    seats = [ExchangeRequest("one", rank, 2, 300.0, nccl=True, address=store) for rank in ranks]

    def share(one: group.Exchange) -> Any:
        with gpus:
            return one.share(torch.ones(1).cuda(one.rank)).tolist()

    monkeypatch.setenv(fake_nccl.FOLDER, str(tmp_path))
    with mock.patch.dict(os.environ), ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as end:
        end.callback(group.close_store, store)
        both = [*pool.map(group.Exchange, seats, [torch.device("cuda", rank) for rank in ranks])]
        assert os.environ["NCCL_MAX_P2P_NCHANNELS"] == "8"
        assert [*pool.map(share, 2 * both)] == [[[1.0], [1.0]]] * 4
        assert gpus.nccl == 2  # each member takes memory, once
        arm(tmp_path, "full alltoall_base 1")
        for one in [pool.submit(share, one) for one in both]:
            assert isinstance(one.exception(timeout=30), group.Abandoned)


def test_replicas_that_hang_in_nccl_share_one_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """And the warning says what may help."""
    clock, executor = [0.0], mock.Mock(failed_joins=0)
    executor.dispatcher.send.return_value.gone = executor.dispatcher.receive.return_value = None

    def ready(seconds: float) -> None:
        clock[0] += seconds

    seats = [ExchangeRequest("one", rank, 8, 1.0) for rank in range(8)]
    slots: Any = [mock.Mock(**{"client.ready": ready}) for _ in seats]
    with mock.patch.object(groups, "time", mock.Mock(monotonic=lambda: clock[0])):
        assert not groups._join(executor, slots, mock.Mock(seats=seats))
    assert (executor.replica_set.lost.call_count, clock[0]) == (8, groups._GRACE)
    assert "NCCL_SOCKET_IFNAME" in caplog.text


def test_layers_that_exchange_do_not_wait_for_the_gpu(gpus: FakeGpus) -> None:
    """The host knows the number of all values from the meeting."""
    alone = mock.Mock(share=lambda row, *_: row[None], swap=lambda rows, _: rows, numbers=[8])
    layer, x = convert_sync_batchnorm(nn.BatchNorm1d(3)).cuda(), torch.randn(8, 3).cuda()
    gpus.counts.clear()
    with mock.patch.object(group, "current", alone):
        layer(x.requires_grad_()).sum().backward()
    assert not gpus.counts["driver waits"]


def test_more_replicas_need_no_more_memory(gpus: FakeGpus) -> None:
    """All have the weights from one window, and the driver adds gradients as they come."""
    module, x, most = net(256).cuda(), torch.randn(20, 256, dtype=torch.double).cuda(), []
    weights = sum(p.nbytes for p in module.parameters())
    for places in ([1, 2, 3], [1, 2, 3, 4, 5]):
        with Executor(places, options=HERE) as executor:
            gpus.memories[0].most = 0
            [*train(DataParallel(module, executor=executor), x)]
            most.append(gpus.memories[0].most)
            assert max(row.bytes_in for row in executor.stats().replicas) < weights
    assert most[1] < most[0] + weights / 2


def test_a_group_listens_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's nodes lack that of a driver whose node is about to end."""
    monkeypatch.setattr(ray_api, "nodes", lambda: [mock.Mock(address="192.0.2.1")])
    assert group.open_store(2, ray_api.own_address()).port


def test_no_row_of_the_benchmark_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the one for a GPU, on the fake one."""
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--out", str(tmp_path / "rows")])
    on_gpu.main()
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    assert [row["contender"] for row in rows if row["deviation"] < 1e-6] == on_gpu.names(2)


@pytest.mark.parametrize("ipc", [True, False])
def test_memory_of_windows_ends_with_their_readers(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, ipc: bool
) -> None:
    """Torch counts them, and one that was killed does not count itself out."""
    near_replicas(gpus, monkeypatch, ipc)
    module, x = net().cuda(), torch.randn(8, 8, dtype=torch.double).cuda()
    before = gpus.memories[0].taken
    with Executor([0], options=HERE) as executor, torch.no_grad():
        for rows in (8, 8, 800):  # a window that grows
            DataParallel(module, executor=executor)(x.repeat(rows, 1))
    del executor
    gc.collect()
    assert gpus.memories[0].taken == before
    assert not gpus._read


def test_windows_are_no_segments_that_grow(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers refuse to share these; the program's memory stays as it wants it."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    gpus.expandable = True
    assert GpuWindow(8, torch.device("cuda", 0)).export
    assert gpus.expandable


def test_odd_tensors_go_where_plain_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the sender's GPU may be another one here, or none."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:3")
    odd = TwoTensor(torch.ones(3), torch.ones(3))
    for place in ("cpu", "meta"):
        assert codec.unflat(codec.flat(odd), torch.device(place)).a.device.type == place


def test_a_step_asks_the_host_for_little() -> None:
    """Counts for ResNet-50's tensors, which no machine changes."""
    found = gpu_host.counted("ipc")
    for kind, limit in gpu_host.LIMITS.items():
        assert found[f"driver {kind}"] + found[f"replica {kind}"] <= limit, kind
    # Each message is waited for, and each pass of the first chunk has a look at its buffers.
    assert (found["driver waits"], found["replica waits"]) == (2, 4)


def test_edits_of_data_are_found_with_one_wait(gpus: FakeGpus) -> None:
    """Contents of what was not sent are compared on the GPU."""
    module = net().cuda()
    with Executor([0], options=HERE) as executor, torch.no_grad():
        model = DataParallel(module.eval(), executor=executor)
        x = torch.randn(8, 8, dtype=torch.double).cuda()
        for _ in range(9):
            before = model(x)
        gpus.counts.clear()
        model(x)
        assert gpus.counts["driver waits"] == 2  # for the message, and for the comparison
        module.get_parameter("0.0.weight").data.mul_(2)
        assert not torch.equal(model(x), before)
        assert torch.equal(model(x), module(x))


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_a_step_with_wrong_bytes_has_no_effect(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Whichever of its messages that was; the next step is right."""
    near_replicas(gpus, monkeypatch, ipc=True)
    module = net().cuda()
    before = {k: v.cpu() for k, v in module.state_dict().items()}
    x = torch.randn(8, 8, dtype=torch.double).cuda()
    with Executor([0], options=HERE) as executor:
        model, sums, right = DataParallel(module, executor=executor), [], memory.total

        def total(run: torch.Tensor) -> int:  # of the sender and of the receiver in turns
            sums.append(right(run) + (len(sums) == 2 * lost - 1))
            return sums[-1]

        monkeypatch.setattr(memory, "total", total)
        with pytest.raises(TransferError, match="'ipc'"):
            [*train(model, x, steps=1)]
        assert all(p.grad is None for p in module.parameters())
        monkeypatch.setattr(memory, "total", right)
        for name, value in module.state_dict().items():
            if "running" not in name and "num" not in name:  # forward may have ended well
                assert torch.equal(value.cpu(), before[name])
        module.load_state_dict(before)
        plain = net().cuda()
        plain.load_state_dict(before)
        assert [*train(model, x)] == pytest.approx([*train(plain, x)], rel=1e-12)


def test_a_replica_that_cannot_read_a_step_has_not_made_it(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an optimizer in the replicas; the step can be repeated."""
    module, plain = net(), net()
    plain.load_state_dict(module.state_dict())
    x = torch.randn(8, 8, dtype=torch.double)
    with Executor([0], options=HERE) as executor:
        model, right = DataParallel(module, executor=executor), memory.total
        inside, own = (
            model.optimizer(torch.optim.SGD, lr=0.1),
            torch.optim.SGD(plain.parameters(), 0.1),
        )
        for one in (model, plain):
            one(x).square().mean().backward()
        inside.clip_grad_norm_(0.1)
        before = [p.clone() for p in module.parameters()]
        monkeypatch.setattr(memory, "total", lambda run: right(run) + (gpus.side == "replica"))
        inside.step()
        with pytest.raises(TransferError):
            model.state_dict()
        monkeypatch.setattr(memory, "total", right)
        assert all(map(torch.equal, module.parameters(), before))
        inside.step()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        own.step()
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b)
