"""What parity tests share: the same module under our wrapper, under upstream's on CPU (the oracle),
and plain.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from inspect import isfunction
from pathlib import Path
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel.driver.dispatcher import Dispatcher

ROOT = Path(__file__).parents[2]


class Apply(nn.Module):
    """Applies a function to itself and its arguments.

    Args:
        function: Takes the module first.
        parts: Layers, parameters, buffers and whatever else it has, by their names.
    """

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def made_of(**parts: Any) -> Callable[[Callable[..., Any]], Callable[[], Apply]]:
    """Make a class of modules, so to say, of what they do in forward.

    Args:
        parts: What each of them has, by its name: sizes are those of a linear layer, a function
            makes it, and all else is copied.
    """

    def make(part: Any) -> Any:
        if isinstance(part, tuple):
            return nn.Linear(*part)
        return part() if isfunction(part) else copy.deepcopy(part)

    def decorate(forward: Callable[..., Any]) -> Callable[[], Apply]:
        return lambda: Apply(forward, **{name: make(part) for name, part in parts.items()})

    return decorate


def ones(*shape: int, **how: Any) -> nn.Parameter:
    """A parameter of ones."""
    return nn.Parameter(torch.ones(shape), **how)


class Trio(NamedTuple):
    """A module under our wrapper, under upstream's over as many logical CPU devices, and plain."""

    ours: Any
    theirs: Any
    plain: nn.Module


def trio(module: nn.Module, replicas: int, **kwargs: Any) -> Trio:
    """Wrap three copies of ``module``."""
    names = {name: value for name, value in kwargs.items() if name in ("dim", "output_device")}
    return Trio(
        raydp_parallel.DataParallel(copy.deepcopy(module), ["cpu"] * replicas, **kwargs),
        oracle.DataParallel(copy.deepcopy(module), list(range(replicas)), **names),
        copy.deepcopy(module),
    )


def carried(model: Any) -> int:
    """Bytes of tensors that travelled between the processes, but for weights."""
    return sum(replica.bytes_in + replica.bytes_out for replica in model.stats().replicas)


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient by name, without the wrapper's prefix."""
    return {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}


def assert_same_grads(one: nn.Module, other: nn.Module, **tolerance: Any) -> None:
    """Both have the same gradients, None where the other has None."""
    ours, theirs = grads(one), grads(other)
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        expected = theirs[name]
        assert (grad is None) == (expected is None), f"{name}: {grad} and {expected}"
        if grad is not None and expected is not None:
            torch.testing.assert_close(grad, expected, **tolerance, msg=_of(name))


def assert_same_state(one: nn.Module, other: nn.Module, **tolerance: Any) -> None:
    """Both have the same parameters and buffers."""
    ours = {name.removeprefix("module."): t for name, t in one.state_dict().items()}
    theirs = {name.removeprefix("module."): t for name, t in other.state_dict().items()}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], **tolerance, msg=_of(name))


def same(left: Any, right: Any) -> None:
    """Both are equal values of equal classes, at any depth."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    elif isinstance(left, (dict, UserDict)):
        same([*left.items()], [*right.items()])
    elif isinstance(left, (list, tuple)):
        for a, b in zip(left, right, strict=True):
            same(a, b)
    elif hasattr(left, "__dataclass_fields__"):
        for name in left.__dataclass_fields__:
            same(getattr(left, name), getattr(right, name))
    else:
        assert left == right


def _of(name: str) -> Callable[[str], str]:
    """What is said of a tensor with this name."""
    return lambda text: f"{name}: {text}"


def tiny_gpt2() -> nn.Module:
    """GPT-2's architecture, tiny, with random weights and no dropout."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=48,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made


def copied(way: str, value: Any) -> Any:
    """A copy of a value, out of a pickle or a file, or by ``deepcopy``."""
    if way == "deepcopy":
        return copy.deepcopy(value)
    if way == "pickle":
        return pickle.loads(pickle.dumps(value))
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def printed(*arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    """What a Python process prints on both streams; it must succeed. It has this checkout on its
    path, and finds no Ray but one that it is told of.
    """
    path = filter(None, [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    # Lines are to be written whole, and another run's workers are no business of a test.
    left_out = re.compile("RAY_ADDRESS|PYTHONUNBUFFERED|PYTEST_.*").fullmatch
    usual = {name: value for name, value in os.environ.items() if not left_out(name)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=usual | {"PYTHONPATH": os.pathsep.join(path)} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def raised(call: Callable[[], Any]) -> BaseException:
    """The exception that a call raises."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def ended(pid: int) -> bool:
    """Waits for a process to end."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.005)
    return False


def kill(executor: raydp_parallel.Executor, *numbers: int) -> None:
    """End replicas from outside, and wait until they are gone."""
    pids = [executor.replicas()[number].pid for number in numbers]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert all(map(ended, pids))


MOMENTS = "before", "sent", "answered", "received"
"""When a replica may end: before a message to it is sent, when it was, when its answer is there, or
when that was read.
"""


@contextlib.contextmanager
def dying(executor: raydp_parallel.Executor, at: int, moment: str) -> Iterator[None]:
    """Let the replica end that gets the message of this number inside of the block, if another one
    has what it has of all models' steps.
    """
    send, receive = Dispatcher.send, Dispatcher.receive
    numbers, due = itertools.count(), []

    def end(slot: Any) -> None:
        os.kill(slot.hello.pid, signal.SIGKILL)
        assert ended(slot.hello.pid)

    def knows(slot: Any) -> bool:
        trained = [m.resident.weights for m in executor._masters.values() if m.resident]
        fresh = all(not (w.unfetched or w.coming) or w.current(slot) for w in trained)
        return fresh and slot.client.alive()

    def dying_send(self: Any, slot: Any, *rest: Any) -> Any:
        others = [other for other in self.replica_set.ready_slots() if other is not slot]
        mortal = next(numbers) == at and slot.ready and any(map(knows, others))
        if mortal and moment == "before":
            end(slot)
        pending = send(self, slot, *rest)
        if mortal and moment == "sent" and pending.arrived:
            end(slot)
        due.extend([pending] * mortal)
        return pending

    def dying_receive(self: Any, pending: Any) -> Any:
        mortal, slot = pending in due and pending.lives, pending.slot
        if mortal and moment == "answered" and slot.client.has_answer(60):
            end(slot)
        answer = receive(self, pending)
        if mortal and moment == "received" and answer is not None:
            end(slot)
        return answer

    executor.grow()  # so that another one has what goes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "send", dying_send)
        patch.setattr(Dispatcher, "receive", dying_receive)
        yield
    executor.flush()  # sees a death that nothing has noticed yet
    executor.grow()


@contextlib.contextmanager
def limited(
    executor: raydp_parallel.Executor,
    seconds: float | None,
    which: Callable[[Any], bool] = lambda call: True,
) -> Iterator[None]:
    """Calls of an executor have this ``call_timeout`` inside of the block, but for those that are
    not ``which``: they may take as long as a busy machine needs.

    For replicas that have run the module before: a first forward imports and builds.
    """
    before, limit = executor.options.call_timeout, executor.dispatcher._limit
    object.__setattr__(executor.options, "call_timeout", seconds)
    executor.dispatcher._limit = lambda one: limit(one) if which(one.call) else None  # type: ignore[method-assign]
    try:
        yield
    finally:
        object.__setattr__(executor.options, "call_timeout", before)
        del executor.dispatcher._limit  # type: ignore[attr-defined]
