"""Replicas among themselves: sums of gradients and weights that are passed on, with the driver's
bits, whatever dies.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from harness import limited, raised
from mortal import arm, armed, fate, rows, same, state, whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raydp_parallel import DataParallel, Executor, Options
from raydp_parallel.calls import replica_groups as driver
from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.transport import codec, collective
from raydp_parallel.transport.collective import Group, Groups, Reducer
from raydp_parallel.transport.collective.backends import _GlooWork
from raydp_parallel.transport.group_messages import GroupKind, JoinGroup, Reduce, SumOutcome
from raydp_parallel.transport.links import Attachments, InlineLink, Link, SharedLink

# --- one group in one process, a thread for each member ---


def together(
    size: int,
    work: Callable[[int, Group], Any],
    kind: GroupKind = GroupKind.GLOO,
    process: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Any]:
    """What each member of a new group makes of it, or what it raised. A member's thread is in a
    block of ``process``.
    """
    host = Groups(secret="secret")
    store = host.host("test")

    def member(rank: int) -> Any:
        groups = host if rank == 0 else Groups(secret="secret")
        with process():
            assert groups.join(JoinGroup("test", rank, size, store, 10.0, kind)) == ""
            group = groups.find("test")
            assert group is not None
            try:
                return work(rank, group)
            except RuntimeError as error:
                return error
            finally:
                groups.leave("test")

    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(member, range(size))]


def test_a_group_listens_at_one_address() -> None:
    """The store and gloo's sockets: not at all that the machine has, as torch's store does."""

    def listening(_rank: int, _group: Group) -> set[str]:
        with Path("/proc/self/net/tcp").open() as table:
            rows = [line.split() for line in table][1:]
        own = set()
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # another thread has closed it
                own.add(os.readlink(path))
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}

    before = listening(0, None)  # type: ignore[arg-type]
    for found in together(2, listening):
        new = found - before
        assert len(new) >= 3 and {where.partition(":")[0] for where in new} == {"0100007F"}


@pytest.mark.parametrize(
    ("encrypts", "link", "wanted"),
    [
        ("0", "auto", [False, True]),
        ("1", "auto", [False, False]),
        ("1", "collective", [True, True]),
    ],
)
def test_where_ray_encrypts_there_are_no_groups_of_several_nodes(
    encrypts: str, link: str, wanted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sockets are as plain to read as lines; a program that asks for groups gets them."""
    monkeypatch.setenv("RAY_USE_TLS", encrypts)
    options = Options(link=link)  # type: ignore[arg-type]
    groups = driver.ReplicaGroups(SimpleNamespace(options=options))  # type: ignore[arg-type]

    def slots(*nodes: str) -> list[Any]:
        found: list[Any] = []
        for number, node in enumerate(nodes):
            found.append(ReplicaSlot(DevicePlace("gpu", number), number))
            found[-1].install(None, ReplicaHello(1, node, "cuda:0", "a GPU", f"gpu {number}", 0, 0))
        return found

    asked = [groups.wanted(slots(*nodes), 1 << 20, None) for nodes in (("a", "a"), ("a", "b"))]
    assert asked == wanted


def word(
    root: int, order: Sequence[int], leaves: int, overlap: bool = True, patience: float = 10.0
) -> Reduce:
    """What the driver would ask for."""
    return Reduce("test", root, tuple(order), tuple(range(leaves)), 1, patience, overlap)


def back(link: Link | None = None) -> Attachments:
    """What the root's sums travel by."""
    return Attachments(link or InlineLink())


def net() -> nn.Module:
    """More than one bucket, two dtypes, and a layout that is not the usual one."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 700), nn.Linear(7, 3).double(), conv)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shared", [False, True], ids=["inline", "shared"])
def test_sums_have_the_order_of_the_chunks(size: int, shared: bool) -> None:
    """To the bit, whichever is the root; every root's sum lies as its parameter does, on its way to
    the driver too.
    """
    leaves = [*net().parameters()]
    grads = [[torch.randn_like(leaf) * 10.0**k for leaf in leaves] for k in range(size)]
    before = copy.deepcopy(grads)
    order = [*reversed(range(size))]

    def work(rank: int, group: Group) -> Any:
        attachments = back(SharedLink(Arena()) if shared else None)
        reducer = Reducer(group, word(1, order, len(leaves)), leaves, attachments)
        assert reducer.finish(grads[rank]) is SumOutcome.DONE
        assert [*reducer.marks] == [1] * len(leaves)
        assert all(
            torch.equal(now, then) for now, then in zip(grads[rank], before[rank], strict=True)
        )
        parcel = reducer.parcel()
        return None if parcel is None else codec.decode(parcel, attachments, torch.device("cpu"))[0]

    found = together(size, work)
    assert found[0] is None
    for i, (leaf, total) in enumerate(zip(leaves, found[1], strict=True)):
        expected = grads[order[0]][i].clone()
        for rank in order[1:]:
            expected += grads[rank][i]
        assert torch.equal(total, expected) and total.stride() == leaf.stride()


def test_what_a_member_lacks_is_zero_and_what_is_odd_is_left_out() -> None:
    """No gradient, a sparse one, one of another dtype: marked, and not in the sum."""
    leaves = [torch.zeros(4, 2, requires_grad=True) for _ in range(4)]
    one = torch.ones(4, 2)
    odd = [one, None, one.to_sparse(), one.double()]

    def work(rank: int, group: Group) -> Any:
        reducer = Reducer(group, word(0, (0, 1), 4), leaves, back())
        assert reducer.finish(odd if rank else [one] * 4) is SumOutcome.DONE
        return reducer.marks, reducer.sums()

    (marks, sums), (others, _) = together(2, work)
    assert [*marks] == [1] * 4 and [*others] == [1, 0, 2, 2]
    assert [int(total[0, 0]) for total in sums] == [2, 1, 1, 1]


def test_buckets_begin_in_one_order_whatever_order_backward_has() -> None:
    """Members come to their leaves in different orders; one comes to some of them never."""
    size = 3

    def work(rank: int, group: Group) -> Any:
        leaves = [torch.full((300_000,), 1.0, requires_grad=True) for _ in range(6)]
        reducer = Reducer(group, word(0, range(size), 6), leaves, back())
        shuffled = [(k * 5 + rank * 2) % 6 for k in range(6 - rank)]
        with reducer.watching():
            for k in shuffled:
                (leaves[k] * (k + 1)).sum().backward()
        assert reducer.finish([leaf.grad for leaf in leaves]) is SumOutcome.DONE
        return shuffled, reducer.sums()

    found = together(size, work)
    for k, total in enumerate(found[0][1]):
        assert float(total[7]) == (k + 1) * sum(k in shuffled for shuffled, _ in found)


def test_a_sum_that_is_ready_early_waits_for_its_turn() -> None:
    """Small buckets overtake large ones on the way, here and there differently; parts are gathered
    in one order.
    """
    size = 4

    def work(rank: int, group: Group) -> Any:
        found = []
        for step in range(30):
            leaves = [
                torch.full((n,), 1.0, requires_grad=True)
                for n in (300, 700, 300_000, 290_000, 270_000)
            ]
            reducer = Reducer(group, word(step % size, range(size), len(leaves)), leaves, back())
            with reducer.watching():
                sum((leaf * step).sum() for leaf in leaves).backward()
            found.append(reducer.finish([leaf.grad for leaf in leaves]))
            found += [float(total[-1]) == size * step for total in reducer.sums() or ()]
        return [*found]

    for found in together(size, work):
        assert set(found) == {SumOutcome.DONE, True}


@pytest.mark.parametrize("failed", [False, True])
def test_what_is_done_just_after_its_time_was_up_is_done(failed: bool) -> None:
    """It is asked again what became of it: the word that it was late may be out of date."""
    waits: list[float] = []

    def wait(time: timedelta) -> None:
        waits.append(time.total_seconds())
        if len(waits) == 1 or failed:
            raise RuntimeError("closed by peer" if len(waits) > 1 else "timed out")

    work = SimpleNamespace(wait=wait, is_completed=lambda: True)
    operation = _GlooWork(work, SimpleNamespace(check=lambda: None))  # type: ignore[arg-type]
    if failed:
        with pytest.raises(RuntimeError, match="closed by peer"):
            operation.finish(time.monotonic() + 10)
    else:
        operation.finish(time.monotonic() + 10)
    assert len(waits) == 2


@pytest.mark.parametrize(
    "again",
    [lambda leaf: leaf.sum().backward(), lambda leaf: leaf.grad.mul_(2)],
    ids=["more", "in place"],
)
def test_a_gradient_that_changes_after_its_sum_has_begun_is_told(
    again: Callable[[Tensor], object],
) -> None:
    """It grows, as with a reentrant checkpoint, of which the backward runs inside of backward; or
    is written to, and it was being read where it lies.
    """

    def work(rank: int, group: Group) -> Any:
        leaf = torch.ones(400_000, requires_grad=True)
        reducer = Reducer(group, word(0, (0, 1), 1), [leaf], back())
        with reducer.watching():
            leaf.sum().backward()
            if rank:
                again(leaf)
        return reducer.finish([leaf.grad])

    assert together(2, work) == [SumOutcome.DONE, SumOutcome.SPOILED]


@pytest.mark.parametrize("size", [2, 3])
def test_who_leaves_is_noticed_at_once(size: int) -> None:
    """Those that wait for a member that leaves do not wait out their time."""

    def work(rank: int, group: Group) -> Any:
        leaf = torch.ones(400_000, requires_grad=True)
        if rank == size - 1:
            time.sleep(0.2)
            group.leave()
            return SumOutcome.FAILED
        return Reducer(group, word(0, range(size), 1, patience=60.0), [leaf], back()).finish(
            [leaf.detach()]
        )

    began = time.monotonic()
    assert together(size, work) == [SumOutcome.FAILED] * size
    assert time.monotonic() - began < 30


def test_who_is_silent_is_not_waited_for_forever() -> None:
    """A member that does nothing costs the others their patience, and no more."""
    done = threading.Event()

    def work(rank: int, group: Group) -> Any:
        leaf = torch.ones(400_000, requires_grad=True)
        if rank:
            done.wait(30)
            return SumOutcome.FAILED
        try:
            return Reducer(group, word(0, (0, 1), 1, patience=0.3), [leaf], back()).finish(
                [leaf.detach()]
            )
        finally:
            done.set()

    assert together(2, work) == [SumOutcome.FAILED] * 2


# --- replicas ---


@pytest.fixture
def three(executors: Any) -> Executor:
    """Three replicas on CPUs of one machine, which exchange all they can among themselves."""
    return executors(3, link="collective", name="killable")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def here() -> Iterator[Executor]:
    """Three that share nothing, in this process: what is right."""
    with Executor(
        ["cpu"] * 3, options=Options(in_process=True, threads=1, link="inline")
    ) as executor:
        yield executor


def among(executor: Executor) -> int:
    """Bytes that replicas have exchanged."""
    return sum(
        account.traffic["collective", "among"] for account in executor.recorder.accounts.values()
    )


def through(executor: Executor) -> int:
    """Bytes that went through the driver."""
    return sum(replica.bytes_in + replica.bytes_out for replica in executor.stats().replicas)


class Wide(nn.Module):
    """Several buckets; a process may end or stop at chosen moments, also while its gradients are
    being summed.
    """

    def __init__(self, folder: Path, width: int = 700) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(6, width), nn.BatchNorm1d(width)
        self.two, self.three = nn.Linear(width, width), nn.Linear(width, 3)
        self.folder = str(folder)

    def forward(self, x: Tensor) -> Tensor:
        chunk, folder = int(x[0, 0]), self.folder
        watch(folder)
        meet(folder, f"forward {chunk}")
        hidden = torch.dropout(self.norm(self.one(x[:, 1:])).tanh(), 0.2, self.training)
        out: Tensor = self.three(self.two(hidden).relu())
        if out.requires_grad:
            out.register_hook(lambda grad: meet(folder, f"backward {chunk}"))
            # The last layers' gradients are there then, and being summed.
            hidden.register_hook(lambda grad: meet(folder, f"midway {chunk}"))
        return out


def meet(folder: str, moment: str) -> None:
    """Stand still or end, if that was asked for: ``"stop midway 1 0"``, ``"midway 1 0"``."""
    sign = Path(folder, f"stop {moment} 0")
    if sign.exists():
        sign.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    fate(folder, moment)


def watch(folder: str) -> None:
    """Let this replica end, by its process id, before weights are passed on, and before and after
    its last sums.
    """
    if collective.pass_on.__name__ == "pass_on" and running_in_replica():
        passed, finished, own = collective.pass_on, Reducer.finish, os.getpid()

        def pass_on_or_die(*given: Any) -> Any:
            meet(folder, f"relay {own}")
            return passed(*given)

        def finish_or_die(*given: Any) -> Any:
            meet(folder, f"sum {own}")
            found = finished(*given)
            meet(folder, f"summed {own}")
            return found

        collective.pass_on, Reducer.finish = pass_on_or_die, finish_or_die  # type: ignore[assignment, method-assign]


def running_in_replica() -> bool:
    """And not in the tests' own process, with replicas inside."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def train(
    executor: Executor,
    folder: Path,
    plan: dict[int, Sequence[str]],
    steps: int,
    chunks: int = 3,
    limits: Mapping[int, float] = MappingProxyType({}),
) -> list[Tensor]:
    """Train, arming ``plan[step]`` before each step; its calls may take ``limits[step]``
    seconds.
    """
    torch.manual_seed(3)
    model = DataParallel(Wide(folder), executor=executor)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for number in range(steps):
        arm(folder, *plan.get(number, ()))
        optimizer.zero_grad()
        with limited(executor, limits.get(number)):
            loss = model(rows(chunks, number)).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *state(model)]


@pytest.mark.long
def test_training_has_the_same_bits_and_the_driver_carries_one_replica(
    three: Executor, here: Executor, tmp_path: Path
) -> None:
    """Weights go to one replica and gradients come from one, whatever goes on among them."""
    expected = train(here, tmp_path, {}, 4)
    before, exchanged = through(three), among(three)
    assert same(train(three, tmp_path, {}, 4), expected)
    size = 4 * sum(p.numel() for p in Wide(tmp_path).parameters())
    moved = through(three) - before
    # one way each, in each step; batch norm's means
    assert 8 * size <= moved <= 8 * size * 1.02 + 4 * 3 * 20_000
    assert among(three) - exchanged >= 4 * 3 * size
    assert [left for _, left in three.flush()] == [0, 0, 0]  # no gradients are kept


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_deaths_in_every_phase_leave_the_same_bits(
    three: Executor, here: Executor, victim: int, tmp_path: Path
) -> None:
    """In forward, while weights are passed on, in backward before, while and after it sums; of the
    root and another.
    """
    # Between two of them a calm step: weights are passed on to those only that hold what the others
    # hold.
    moments = [
        "",
        f"forward {victim}",
        f"backward {victim}",
        f"midway {victim}",
        "",
        "relay",
        "sum",
        "summed",
    ]
    expected = train(here, tmp_path, {}, len(moments))
    whole(three)
    deaths = three.stats().deaths
    torch.manual_seed(3)
    model = DataParallel(Wide(tmp_path), executor=three)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for number, moment in enumerate(moments):
        pid = whole(three).replicas()[victim].pid
        if moment:
            arm(tmp_path, moment if " " in moment else f"{moment} {pid}")
        optimizer.zero_grad()
        loss = model(rows(3, number)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert not armed(tmp_path)
    assert three.stats().deaths == deaths + 6
    assert same([*losses, *state(model)], expected)


@pytest.mark.long
def test_one_that_stands_still_is_ended_and_no_other(
    here: Executor, cluster: None, tmp_path: Path
) -> None:
    """Others that wait for it in a sum give up in time to answer, and are not taken for
    silent too.
    """
    expected = train(here, tmp_path, {}, 3)
    with Executor(["cpu"] * 3, options=Options(link="collective")) as executor:
        assert same(train(executor, tmp_path, {1: ["stop midway 1"]}, 3, limits={1: 5.0}), expected)
        assert not armed(tmp_path)
        assert executor.stats().deaths == 1


@pytest.mark.parametrize("who", [0, 1])
def test_weights_and_sums_that_do_not_arrive_go_through_the_driver(
    three: Executor, here: Executor, who: int, tmp_path: Path
) -> None:
    """One of them has left the group without a word: it is sent the weights, all answer with their
    own gradients.
    """
    expected = train(here, tmp_path, {}, 3)
    train(whole(three), tmp_path, {}, 1)  # there is a group
    (group,) = (known for known in three.groups._known.values() if len(known.slots) == 3)
    ray.get(group.slots[who].client.actor.leave.remote([group.name]))
    deaths, reruns = three.stats().deaths, three.stats().replays
    assert same(train(three, tmp_path, {}, 3), expected)
    assert (three.stats().deaths, three.stats().replays) == (deaths, reruns)
    assert group.name not in {known.name for known in three.groups._known.values()}


def test_where_no_group_can_be_made_the_driver_does_all(
    three: Executor,
    here: Executor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first time that is a warning; it is not tried again with each call."""
    expected, tries = train(here, tmp_path, {}, 3), []
    whole(three)
    for group in [*three.groups._known.values()]:
        three.groups.dissolve(group)
    monkeypatch.setattr(three.groups, "_gather", lambda *_: tries.append(1) or "no route to host")
    exchanged = among(three)
    assert same(train(three, tmp_path, {}, 3), expected)
    assert len(tries) == 1 and among(three) == exchanged
    assert [r.levelname for r in caplog.records if "no route to host" in r.getMessage()] == [
        "WARNING"
    ]
    three.groups._not_before = 0.0


class Own(nn.Module):
    """Tells whether its process has a default group."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x) + float(torch.distributed.is_initialized())
        return out


def test_the_default_group_is_the_users(three: Executor, here: Executor) -> None:
    """Groups of ours leave it alone."""
    torch.manual_seed(5)
    module = Own()
    model = DataParallel(module, executor=whole(three))
    for _ in range(2):
        out = model(rows(3, 1))
        out.sum().backward()
    assert torch.equal(out, DataParallel(module, executor=here)(rows(3, 1)))
    assert not torch.distributed.is_initialized()


class Odd(nn.Module):
    """Everything that does not fit into a plain sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.words = nn.Embedding(5, 8, sparse=True)
        self.fine = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.imaginary = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.last = nn.Linear(8, 3)
        self.tied = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        chunk, x = int(x[0, 0]), x[:, 1:]
        h = self.first(x)
        h = self.sometimes(h) if chunk == 1 else h
        h = (
            h + self.words((x[:, 0].abs() * 2).long().clamp(max=4))
            if chunk
            else h + self.words.weight.sum(0)
        )
        h = (h * self.fine).float() + (h * self.imaginary).abs()
        if x.requires_grad and chunk == 2:
            h = checkpoint(self.first, x, use_reentrant=False) + h
        out: Tensor = self.last(h.tanh()) + self.tied.sum()
        return out


def odd_steps(executor: Executor) -> list[Tensor | None]:
    """Gradients by every way there is to ask for them."""
    torch.manual_seed(5)
    model, found = DataParallel(Odd(), executor=executor), []
    parameters = [*model.parameters()]

    def grads() -> None:
        found.extend(None if p.grad is None else p.grad.to_dense().clone() for p in parameters)
        model.zero_grad()

    for chunks in (3, 2, 1, 3):  # not all replicas have a chunk
        model(rows(chunks, chunks)).square().mean().backward()
        grads()
    x = rows(3, 9).requires_grad_()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    grads()
    found.append(x.grad)
    x = rows(3, 10).requires_grad_()
    first, last = model.module.first.weight, model.module.last.bias
    found += torch.autograd.grad(model(x).sum(), [last, x, first])
    model.module.first.weight.requires_grad_(False)
    (model(x).square().mean() + model(x.detach()).abs().mean()).backward()
    grads()
    return found


def test_what_does_not_fit_into_a_sum_is_right_all_the_same(
    three: Executor, here: Executor
) -> None:
    """Unused parameters, sparse, double and complex ones, ties, few chunks, retained graphs, a part
    of the leaves.
    """
    expected = odd_steps(here)
    found = odd_steps(whole(three))
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one is None) == (other is None), i
        assert one is None or torch.equal(one, other), i  # type: ignore[arg-type]  # both are tensors


def test_second_order(three: Executor, here: Executor) -> None:
    """A gradient penalty: its first derivatives are themselves differentiated."""

    def grads(executor: Executor) -> list[Tensor]:
        torch.manual_seed(5)
        model = DataParallel(
            nn.Sequential(nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 1)), executor=executor
        )
        x = rows(3, 1).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert same(grads(whole(three)), grads(here))


class Shared(nn.Module):
    """A weight that two reentrant checkpoints use: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.one, x.requires_grad_(), use_reentrant=True)
        return x


def test_gradients_that_come_in_parts(three: Executor, here: Executor) -> None:
    """The first time the driver sums; from then on replicas wait for the end of backward."""

    def grads(executor: Executor) -> list[Tensor]:
        torch.manual_seed(5)
        model = DataParallel(Shared(), executor=executor)
        for number in range(3):
            model(rows(3, number)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert same(grads(whole(three)), grads(here))


class Failing(nn.Module):
    """Fails in one chunk's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 700), nn.Linear(700, 500)

    def forward(self, x: Tensor) -> Tensor:
        chunk, hidden = int(x[0, 0]), self.one(x[:, 1:])
        if hidden.requires_grad and x[0, 1] > 5 and chunk == 1:
            hidden.register_hook(self.fail)
        out: Tensor = self.two(hidden)
        return out

    def fail(self, _grad: Tensor) -> None:
        """Midway."""
        raise ValueError("no gradient today")


def test_a_failure_in_one_chunk_is_raised_and_leaves_nobody_waiting(
    three: Executor, here: Executor
) -> None:
    """In the midst of the sum; and the next step is as if nothing had been."""
    torch.manual_seed(5)
    module = Failing()
    x, bad = rows(3, 1), rows(3, 1)
    bad[:, 1] = 6
    expected = DataParallel(copy.deepcopy(module), executor=here)
    expected(x).square().mean().backward()
    model = DataParallel(module, executor=whole(three))
    deaths, began = three.stats().deaths, time.monotonic()
    error = raised(lambda: model(bad).square().mean().backward())
    assert isinstance(error, ValueError) and "no gradient today" in str(error)
    model.zero_grad()
    model(x).square().mean().backward()
    assert time.monotonic() - began < 30 and three.stats().deaths == deaths
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]  # both are tensors


def test_calls_of_several_threads(three: Executor, here: Executor) -> None:
    """Their sums pass each other in no replica."""
    torch.manual_seed(5)
    modules = [nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 300)) for _ in range(3)]

    def grads(executor: Executor, number: int) -> list[Tensor]:
        model = DataParallel(copy.deepcopy(modules[number]), executor=executor)
        for step in range(6):
            model(rows(3, step)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    whole(three)
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda number: grads(three, number), range(3))]
    for number in range(3):
        assert same(found[number], grads(here, number))
