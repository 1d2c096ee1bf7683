"""The stand-in GPU itself: what is wrong in a program has to show, what is right to be right."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import on_gpus
import pytest
import torch
from torch import nn

if on_gpus.asked() in ("cpu", "cuda"):
    pytest.skip("the driver has no stand-in GPU: --device cuda:0", allow_module_level=True)

import standin

HERE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(params=[False, True])
def others_first(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Let a wait for one stream run what others have, or nothing of it."""
    standin.switch("others_first", request.param)
    yield request.param
    standin.switch("others_first", False)


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_to_the_host_comes_when_it_is_waited_for(waits: bool) -> None:
    """The host's memory holds nothing of it before."""
    host = torch.zeros(4, device="cpu").pin_memory()
    host.copy_(torch.ones(4, device=HERE), non_blocking=True)
    if waits:
        torch.cuda.current_stream(HERE).synchronize()
    assert (host == 1).all() == waits


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_from_the_host_reads_when_it_is_waited_for(waits: bool) -> None:
    """Pinned memory that is used again too early arrives with what came later."""
    host = torch.ones(4, device="cpu").pin_memory()
    there = host.to(HERE, non_blocking=True)
    if waits:
        torch.cuda.current_stream(HERE).synchronize()
    host.fill_(2)
    assert there.tolist() == [1.0 if waits else 2.0] * 4
    usual = torch.ones(4, device="cpu")
    there = usual.to(HERE, non_blocking=True)
    usual.fill_(2)
    assert there.tolist() == [1.0] * 4  # memory that is not pinned is read at once


@pytest.mark.parametrize("waits", [False, True])
def test_streams_wait_for_each_other_only_if_they_are_told(others_first: bool, waits: bool) -> None:
    """Where another stream has not come so far, memory holds what it held."""
    with torch.cuda.device(HERE):
        made, side = torch.ones(4, device=HERE) * 3, torch.cuda.Stream()
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            twice = made * 2
        side.synchronize()
        with torch.cuda.stream(side):
            right = twice.tolist() == [6.0] * 4
        assert right == (waits or others_first)


@pytest.mark.parametrize("records", [False, True])
def test_memory_is_used_again_unless_it_was_recorded(others_first: bool, records: bool) -> None:
    """By the stream that it was taken on, which may be ahead of the one that still reads it."""
    with torch.cuda.device(HERE):
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        made = torch.ones(1000, device=HERE)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            twice = made * 2
        if records:
            made.record_stream(side)
        del made
        torch.zeros(1000, device=HERE)
        side.synchronize()
        with torch.cuda.stream(side):
            assert (twice.tolist() == [2.0] * 1000) == (records or not others_first)


def test_memory_that_is_given_back_too_early_is_noticed() -> None:
    """By whoever registered it; and an error that nobody took comes with the next kernel."""
    runtime, host = torch.cuda.cudart(), torch.zeros(1 << 12, device="cpu")
    at, size, torn = host.data_ptr(), host.nbytes, standin.number("torn")
    assert runtime.cudaHostRegister(at, size, 0) == 0
    assert runtime.cudaHostRegister(at, size, 0) == 712
    with pytest.raises(RuntimeError, match="already mapped"):
        torch.ones(1, device=HERE)
    host.copy_(torch.ones(1 << 12, device=HERE), non_blocking=True)
    runtime.cudaHostUnregister(at)
    assert standin.number("torn") == torn + 1
    torch.cuda.synchronize(HERE)
    runtime.cudaHostRegister(at, size, 0)
    host.copy_(torch.ones(1 << 12, device=HERE), non_blocking=True)
    torch.cuda.synchronize(HERE)
    assert runtime.cudaHostUnregister(at) == 0
    assert standin.number("torn") == torn + 1
    standin.lib.standin_forget_torn()  # the look after each test finds them


@pytest.mark.parametrize("other", [OTHER, torch.device("cpu")])
def test_an_operation_has_one_device(other: torch.device) -> None:
    """But for numbers, and for indices, which may lie on the host."""
    here, there = torch.ones(2, 2, device=HERE), torch.ones(2, 2, device=other)
    for call in (torch.add, torch.mm, nn.functional.linear, lambda a, b: torch.cat([a, b])):
        with pytest.raises(RuntimeError, match="same device"):
            call(here, there)
    assert (here + torch.tensor(2.0, device="cpu")).sum().item() == 12
    assert here[torch.tensor([0], device="cpu")].shape == (1, 2)


def test_devices_have_generators_and_contexts_of_their_own() -> None:
    """Random numbers of one are no other's, nor the CPU's; and what is not used is not started."""
    before = torch.get_rng_state()
    torch.cuda.manual_seed_all(7)
    state = torch.cuda.get_rng_state(HERE)
    first, dropped = torch.rand(4, device=HERE), nn.functional.dropout(torch.ones(9, device=HERE))
    torch.rand(4, device=OTHER)
    torch.cuda.set_rng_state(state, HERE)
    assert torch.equal(torch.rand(4, device=HERE), first)
    assert torch.equal(nn.functional.dropout(torch.ones(9, device=HERE)), dropped)
    assert not torch.equal(torch.rand(4, device=HERE), first)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device=HERE, generator=torch.Generator("cpu"))
    assert standin.number("started", on_gpus.GPUS - 1) == 0


def test_memory_and_time_are_counted() -> None:
    """As torch's own statistics, and events, give them."""
    gc.collect()
    before = torch.cuda.memory_allocated(HERE)
    torch.cuda.reset_peak_memory_stats(HERE)
    held = torch.ones(1 << 10, device=HERE)
    assert torch.cuda.memory_allocated(HERE) == before + (1 << 12)
    del held
    assert torch.cuda.memory_allocated(HERE) == before
    assert torch.cuda.max_memory_allocated(HERE) == before + (1 << 12)
    with torch.cuda.device(HERE):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for event in events:
            event.record()
            torch.ones(4, device=HERE).mul_(2)
        assert not events[2].query()
        events[2].synchronize()
    assert events[0].elapsed_time(events[2]) > events[0].elapsed_time(events[1]) > 0


SCRIPTS = {
    "a host that reads": ("import ctypes; ctypes.string_at(x.data_ptr(), 1)", -signal.SIGSEGV, ""),
    "a kernel that fails": (
        """
y = torch.nn.functional.embedding(torch.tensor([9]).cuda(), x.view(2, 2))
try: torch.cuda.synchronize()
except RuntimeError: pass
x + 1
""",
        1,
        "device-side assert",
    ),
    "a second device": ("x + x.to('cuda:1')", 1, "at least two devices"),
    "a forked process": (
        "import os; pid = os.fork()\nif not pid: x + 1\nassert os.waitpid(pid, 0)[1] == 0",
        1,
        "forked subprocess",
    ),
}


@pytest.mark.parametrize("which", SCRIPTS)
def test_what_ends_a_program(which: str) -> None:
    """Or lets it compute nothing more."""
    code, status, text = SCRIPTS[which]
    code = f"import torch\nx = torch.ones(4).cuda()\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == status and text in done.stderr, done.stderr


READER = """
import pickle, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
for line in sys.stdin:
    try:
        t = rebuild_cuda_tensor(*pickle.loads(bytes.fromhex(line)))
        print("values", t.tolist(), flush=True)
    except RuntimeError as error:
        print("error", error, flush=True)
del t
"""


def test_memory_in_two_processes() -> None:
    """Another one sees it once it was waited for, on the same card; it stays as long as that reads,
    and is opened once; and not by who made it.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

    def start(gpu: str) -> Any:
        own = {"CUDA_VISIBLE_DEVICES": gpu, "STANDIN_GPUS": "2"}
        env = {**os.environ, **own}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", READER], env=env, **pipes)

    def ask(reader: Any, export: Any) -> str:
        reader.stdin.write(pickle.dumps(export).hex() + "\n")
        reader.stdin.flush()
        return str(reader.stdout.readline())

    with start("0") as reader, start("1") as elsewhere:
        torch.cuda.synchronize(HERE)
        made = torch.ones(2, device=HERE)
        assert "1.0" not in ask(reader, reduce_tensor(made)[1])  # nobody has waited
        torch.cuda.synchronize(HERE)
        export = reduce_tensor(made)[1]
        with pytest.raises(RuntimeError, match="invalid device context"):
            rebuild_cuda_tensor(*export)
        assert "another GPU" in ask(elsewhere, export)
        assert ask(reader, export) == "values [1.0, 1.0]\n"
        del made
        assert standin.number("awaiting") == 1
        reader.stdin.close(), elsewhere.stdin.close()
    torch.cuda.ipc_collect()
    assert standin.number("awaiting") == 0


MEMBER = """
import sys, threading, torch
from torch import distributed as dist
path, rank = sys.argv[1], int(sys.argv[2])
group = dist.ProcessGroupNCCL(dist.FileStore(path, 2), rank, 2, dist.ProcessGroupNCCL.Options())
def give(sent):
    got = torch.empty_like(sent)
    return got, group.alltoall_base(got, sent, [], [], dist.AllToAllOptions())
def until_done(work):
    while not work.is_completed():
        pass
sent = torch.full((2,), rank + 1.0).cuda()
got, work = give(sent)
"""
MEMBERS = {
    "until_done(work); work.wait(); print(got.tolist())": "[1.0, 2.0]",
    "work.wait(); print(got.tolist())": "[1.0, 2.0]",
    "print(got.tolist()); until_done(work)": "[nan, nan]",
    """
with torch.cuda.stream(torch.cuda.Stream()):
    sent *= 2  # which is not waited for
until_done(work); torch.cuda.synchronize(); print(got.tolist())
""": "[1.0, 2.0]",
    """
work.wait()
if rank == 0:
    got, work = give(sent)  # the other one does not come
    print([work.is_completed() for _ in range(9)][-1])
    threading.Timer(0.1, group.abort).start()
    torch.cuda.synchronize()
    print(work.is_completed())
    give(sent)
""": "False True NCCL communicator was aborted",
}


@pytest.mark.parametrize("code", MEMBERS)
def test_nccl(tmp_path: Any, code: str) -> None:
    """Works in a stream behind the caller's, until all have come, or it is aborted."""
    both = []
    for rank in ("0", "1"):
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": rank}
        command = [sys.executable, "-c", MEMBER + code, str(tmp_path / "store"), rank]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        both.append(subprocess.Popen(command, env=env, **pipes))
    out, error = both[0].communicate(timeout=100)
    both[1].communicate(timeout=100)
    said = [*out.split(), *error.splitlines()[-1:]]
    assert " ".join(said).replace("torch.distributed.DistBackendError: ", "") == MEMBERS[code]
