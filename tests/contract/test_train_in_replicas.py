"""`DataParallel.optimizer`: training in the replicas gives the bits of the same optimizer in the
driver, whatever dies, and the master copy is up to date wherever the wrapper gives it away.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import optimizer_of, raised
from mortal import Everything, Mortal, arm, armed, fate, rows, same
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor, ExecutorClosed, Options, StateChanged, StateLost
from raydp_parallel.calls import training_record
from raydp_parallel.calls.remote_gradients import RemoteGradient, lies_remote
from raydp_parallel.calls.replica_optimizer import ReplicaOptimizer

pytestmark = pytest.mark.usefixtures("cluster")


class Net(nn.Module):
    """Batch norm, dropout, tied weights, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.middle.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        h = torch.dropout(self.tied(self.middle(h).relu()).relu(), 0.2, self.training)
        return self.last(self.frozen(h))


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """The biases without decay, and all else."""
    named = [*net.named_parameters()]
    biases = [p for name, p in named if name.endswith("bias")]
    weights = [p for name, p in named if not name.endswith("bias")]
    return [{"params": biases, "weight_decay": 0.0}, {"params": weights}]


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
}


def train(
    executor: Executor,
    kind: str,
    inside: bool,
    steps: int = 20,
    accumulated: int = 1,
    groups: bool = False,
) -> tuple[list[Tensor], DataParallel[Any], Any]:
    """Train with an optimizer in the replicas, or in this process: losses, weights, buffers and
    the optimizer's state.
    """
    torch.manual_seed(3)
    net = Net()
    model = DataParallel(net, executor=executor)
    optimizer_class, keywords = KINDS[kind]
    chosen: Any = two_groups(net) if groups else net.parameters()
    optimizer = optimizer_of(model, inside, optimizer_class, chosen, **keywords)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=step % 3 > 0)
        for _ in range(accumulated):
            loss = nn.functional.cross_entropy(
                model(torch.randn(12, 6)), torch.randint(0, 3, (12,))
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        found.append(loss.detach())
    assert (model.stats().steps_behind == steps) is inside
    found += [*model.state_dict().values()]
    for values in optimizer.state_dict()["state"].values():
        found += [torch.as_tensor(value) for value in values.values() if value is not None]
    return [tensor.clone() for tensor in found], model, optimizer


# --- the same bits ---


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_T1_the_bits_of_the_optimizer_in_the_driver(
    replicas: int, kind: str, executors: Any
) -> None:
    """Twenty steps with a scheduler, clipping, tied weights, batch norm, dropout, and frozen and
    unused parameters.
    """
    executor = executors(replicas)
    found, *_ = train(executor, kind, inside=True)
    expected, *_ = train(executor, kind, inside=False)
    assert same(found, expected)


@pytest.mark.parametrize("kind", ["foreach", "fused", "Adagrad"])
def test_T1_other_ways_to_compute_a_step(kind: str, two: Executor) -> None:
    """Those that work on lists, in one kernel, and with state from the constructor."""
    assert same(train(two, kind, True, steps=6)[0], train(two, kind, False, steps=6)[0])


def test_T1_groups_and_accumulation(two: Executor) -> None:
    """Two groups of parameters, and two backwards before each step."""
    how: dict[str, Any] = {"steps": 8, "accumulated": 2, "groups": True}
    assert same(train(two, "AdamW", True, **how)[0], train(two, "AdamW", False, **how)[0])


class Words(nn.Module):
    """An embedding with sparse gradients, and a layer with others."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(400, 64, sparse=True), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x).mean(1))


@pytest.mark.parametrize("link", ["auto", pytest.param("shared", marks=pytest.mark.long)])
def test_T1_sparse_gradients(link: str, executors: Any) -> None:
    """They do not stay in shared memory, also if they are large enough for it."""
    net = Words()
    model = DataParallel(copy.deepcopy(net), executor=executors(2, link=link))
    results = []
    for inside in (False, True):
        model.load_state_dict({f"module.{name}": t for name, t in net.state_dict().items()})
        optimizer = optimizer_of(model, inside, torch.optim.SGD, lr=0.1)
        for step in range(3):
            numbers = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            model(torch.randint(0, 400, (8, 100), generator=numbers)).square().sum().backward()
            optimizer.step()
        results.append([t.clone() for t in model.state_dict().values()])
    optimizer.close()
    assert same(*results)


def test_T1_in_this_process() -> None:
    """Replicas inside of the driver's process train as others do."""
    with Executor(["cpu"] * 2, options=Options(in_process=True, threads=1)) as executor:
        assert same(train(executor, "Adam", True)[0], train(executor, "Adam", False)[0])


def test_T1_large_weights_do_not_travel(two: Executor) -> None:
    """Of weights that lie in shared memory otherwise, nothing is sent after the first forward."""
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = DataParallel(nn.Linear(700, 500), executor=two)
        keywords: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        optimizer = optimizer_of(model, inside, torch.optim.SGD, **keywords)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 700) * step).square().mean().backward()
            optimizer.step()
            if step == 1:
                before = model.stats()
        if inside:
            after = model.stats()
            pairs = zip(after.replicas, before.replicas, strict=True)
            assert [one.state_sent - old.state_sent for one, old in pairs] == [0, 0]
        found.append([p.detach().clone() for p in model.parameters()])
    assert same(*found)


@pytest.fixture(params=["collective", "shared"])
def exchanging(executors: Any, request: pytest.FixtureRequest) -> Executor:
    """Two replicas that sum gradients of any size among themselves, or where they lie."""
    if request.param == "shared" and request.config.getoption("--nodes"):
        pytest.skip("several nodes share no memory")
    return executors(link=request.param, name="killable")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("replicas", "kind"), [(2, "AdamW"), pytest.param(3, "SGD", marks=pytest.mark.long)]
)
def test_T5_gradients_that_stay_in_the_replicas(
    replicas: int, kind: str, exchanging: Executor, executors: Any
) -> None:
    """Accumulated in groups, and clipped by torch, which fetches them."""
    how: dict[str, Any] = {"steps": 8, "accumulated": 2, "groups": True}
    executor = executors(replicas, link=exchanging.options.link, name="killable")
    found, model, _ = train(executor, kind, inside=True, **how)
    assert isinstance(model.module.first.weight.grad, RemoteGradient)
    assert same(found, train(executor, kind, inside=False, **how)[0])


def test_T5_nothing_but_inputs_and_answers_travels(exchanging: Executor) -> None:
    """Clipped by the optimizer's own ways, by norm and by value, with an unused parameter."""
    results, sent = [], []
    for inside in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 700))
        net.register_parameter("unused", nn.Parameter(torch.ones(5)))
        model = DataParallel(net, executor=exchanging)
        optimizer = optimizer_of(model, inside, torch.optim.AdamW, lr=1e-3)
        found = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 > 0)
            for _ in range(1 + step % 2):
                x = torch.randn(12, 700, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
            if inside:
                found.append(optimizer.grad_norm())
                found.append(optimizer.clip_grad_norm_(0.01))
                optimizer.clip_grad_value_(1e-4)
                assert lies_remote(net[0].weight.grad)
            else:
                grads = [p.grad for p in net.parameters()]
                found.append(torch.nn.utils.get_total_norm(grads))
                found.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01))
                torch.nn.utils.clip_grad_value_(net.parameters(), 1e-4)
            optimizer.step()
            if step == 0:
                before = model.stats()
        after = model.stats()
        pairs = [*zip(after.replicas, before.replicas, strict=True)]
        sent.append(sum(a.bytes_in + a.bytes_out - b.bytes_in - b.bytes_out for a, b in pairs))
        results.append([*found, *[t.clone() for t in model.state_dict().values()]])
    assert same(*results)
    assert sent[0] < 1_000_000 < sent[1], sent


@pytest.mark.parametrize("clipped", ["", "by the optimizer", "by torch"])
def test_T5_an_edit_between_backward_and_step(clipped: str, exchanging: Executor) -> None:
    """The step is made with the gradients as they were and the weights as they are; while the
    master is behind, the edit is refused, and the step is made after a sync.
    """
    found = []
    for inside in (True, False):
        model, optimizer = small(exchanging, inside)
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            if step == 1:
                model.state_dict()
            if step == 1 or (inside and step == 3):
                with torch.no_grad():
                    model._master[0].weight.mul_(0.5)
            if inside and step == 3:
                assert isinstance(raised(optimizer.step), StateChanged)
                model.sync()
            if clipped == "by the optimizer" and inside:
                optimizer.clip_grad_norm_(0.01)
            elif clipped:
                torch.nn.utils.clip_grad_norm_(model._master.parameters(), 0.01)
            optimizer.step()
        found.append([t.clone() for t in model.state_dict().values()])
    assert same(*found)


def test_T5_clipped_gradients_that_no_step_takes(exchanging: Executor) -> None:
    """Replicas free them, as where a program skips a step of which the norm is not finite."""
    model, optimizer = small(exchanging)
    kept = []
    for step in range(4):
        torch.manual_seed(step)
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.clip_grad_norm_(0.01)
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(8, 6))
        kept.append([*exchanging.flush()])
    assert kept[3] == kept[1]


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("what", ["edit", "group", "close"])
def test_T5_weights_change_hands_between_clipping_and_step(
    what: str, made: bool, exchanging: Executor
) -> None:
    """By an edit, another group, or the end of the optimizer; whether replicas have clipped
    already or not.
    """
    found = []
    for inside in (True, False):
        model, optimizer = small(exchanging, inside)
        if what == "group":
            model._master.register_parameter("late", nn.Parameter(torch.ones(3)))
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            if inside:
                model.sync()
                optimizer.clip_grad_norm_(0.01)
            else:
                torch.nn.utils.clip_grad_norm_(model._master.parameters(), 0.01)
            if made:
                with torch.no_grad():
                    model(torch.ones(8, 6))
            if what == "edit":
                with torch.no_grad():
                    model._master[0].weight.mul_(0.5)
            elif what == "group" and step == 1:
                optimizer.add_param_group({"params": [model._master.late], "lr": 0.1})
            elif what == "close" and inside and step == 2:
                state = optimizer.state_dict()
                optimizer.close()
                optimizer = torch.optim.Adam(model._master.parameters(), lr=0.01)
                optimizer.load_state_dict(state)
            optimizer.step()
        found.append([t.clone() for t in model.state_dict().values()])
    assert same(*found)


def test_T5_gradients_under_inference_mode(exchanging: Executor) -> None:
    """Used, changed and zeroed there, and steps and syncs made there: all can be used outside."""
    found = []
    for inside in (True, False):
        model, optimizer = small(exchanging, inside)
        net = model._master
        for step in range(5):
            torch.manual_seed(step)
            if step == 3:
                with torch.inference_mode():
                    optimizer.zero_grad(set_to_none=False)
            else:
                optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            with torch.inference_mode():
                found.append(net[0].weight.grad.norm().clone())
                net[0].bias.grad.mul_(0.5)
                if step == 1:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
                if inside and step == 2:
                    optimizer.clip_grad_norm_(0.01)
                    optimizer.step()
                    model.sync()
            if not inside and step == 2:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            if not inside or step != 2:
                optimizer.step()
        found += [t.clone() for t in model.state_dict().values()]
    half = len(found) // 2
    assert same(found[:half], found[half:])


# --- whatever dies ---


class Fragile(torch.optim.Adam):
    """Ends the process of a replica in a step, or as its state is fetched, where that was asked
    for.
    """

    def __init__(self, params: Any, lr: float, folder: str, driver: int) -> None:
        super().__init__(params, lr=lr)
        self.folder, self.driver = folder, driver

    def step(self, closure: Any = None) -> Any:
        if os.getpid() != self.driver:
            end(self.folder, "step")
        out = super().step(closure)
        if os.getpid() != self.driver:
            end(self.folder, "late step")
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    self.state[p]["fuse"] = Fuse(self.folder, self.driver)
        return out


class Fuse:
    """Ends the process that sends it, where that was asked for."""

    def __init__(self, folder: str, driver: int) -> None:
        self.folder, self.driver = folder, driver

    def __reduce__(self) -> Any:
        if os.getpid() != self.driver:
            end(self.folder, "sync")
        return Fuse, (self.folder, self.driver)


def end(folder: str, moment: str) -> None:
    """`fate`, for several processes that come to a moment at the same time."""
    try:
        fate(folder, moment)
    except FileNotFoundError:
        return  # of another process


def train_fragile(
    executor: Executor, folder: Path, plan: dict[int, list[str]], inside: bool, sync_at: int = -1
) -> list[Tensor]:
    """Losses and the final state; arms ``plan[step]`` before each step."""
    torch.manual_seed(7)
    chunks = len(executor.device_ids)
    model = DataParallel(Mortal(Everything(), folder), executor=executor)
    keywords: dict[str, Any] = {"lr": 0.01, "folder": str(folder), "driver": os.getpid()}
    optimizer = optimizer_of(model, inside, Fragile, **keywords)
    found = []
    for step in range(7):
        executor.grow()  # so that it has more than one replica when one is to die
        arm(folder, *plan.get(step, ()))
        if step == sync_at:
            model.sync()
        optimizer.zero_grad()
        loss = model(rows(chunks, step)).square().mean()
        if "between" in plan.get(step, ()):
            kill(executor, 1)
            (folder / "between 0").unlink()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    found += [*model.state_dict().values()]
    for values in optimizer.state_dict()["state"].values():
        found += [value for value in values.values() if isinstance(value, Tensor)]
    return [tensor.clone() for tensor in found]


def kill(executor: Executor, *numbers: int) -> None:
    """End replicas from outside, and wait until they are gone."""
    for number in numbers:
        process = os.pidfd_open(executor.replicas()[number].pid)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
        os.close(process)


@pytest.mark.parametrize(
    "plan",
    [
        {2: ["backward 0"]},
        pytest.param({2: ["forward 1"], 3: ["backward 0"], 5: ["step"]}, marks=pytest.mark.long),
        pytest.param({2: ["late forward 0"]}, marks=pytest.mark.long),
        pytest.param({2: ["backward 1"], 4: ["backward 0"] * 2}, marks=pytest.mark.long),
        pytest.param({3: ["between"]}, marks=pytest.mark.long),
        pytest.param({2: ["step"], 4: ["late step"]}, marks=pytest.mark.long),
        {3: ["sync"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.long)])
def test_T2_a_death_changes_no_bit(
    plan: dict[int, list[str]],
    replicas: int,
    executors: Any,
    tmp_path: Path,
) -> None:
    """In forward, backward, between them, before and after a step, and as weights are fetched."""
    with Executor(["cpu"] * replicas, options=Options(in_process=True, threads=1)) as here:
        expected = train_fragile(here, tmp_path, {}, inside=False)
    executor = executors(replicas, name="killable")
    deaths = executor.stats().deaths
    found = train_fragile(executor, tmp_path, plan, inside=True, sync_at=4)
    assert armed(tmp_path) == []
    assert same(found, expected)
    assert executor.stats().deaths > deaths


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "midst"),
    [
        ("memory", ""),
        ("group", ""),
        ("memory", "leaving"),
        ("group", "leaving"),
        ("group", "passing"),
    ],
)
def test_T2_newcomers_take_over_from_another_replica(
    way: str, midst: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy of the model in a process that is left, and then a new process: neither 4 MB of
    weights nor 8 MB of state pass through the driver. If the giver dies, another replica's do.
    """
    if way == "group":
        monkeypatch.setattr(training_record, "shares", lambda slot: False)
    options = Options(link="collective" if way == "group" else "auto")
    passing = training_record.passing
    results = []
    with Executor(["cpu"] * 3, options=options) as executor:

        def carried() -> int:
            return sum(one.bytes_in + one.bytes_out for one in executor.stats().replicas)

        def pass_and_die(groups: Any, ticket: Any, giver: Any, *more: Any) -> Any:
            if armed(tmp_path):
                (tmp_path / "passing 0").unlink()
                kill(executor, giver.index)
            return passing(groups, ticket, giver, *more)

        monkeypatch.setattr(training_record, "passing", pass_and_die)
        for inside in (True, False):
            executor.grow()
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 700))
            model = DataParallel(net, executor=executor)
            keywords: dict[str, Any] = {"lr": 1e-3, "folder": str(tmp_path), "driver": os.getpid()}
            optimizer = optimizer_of(model, inside, Fragile, **keywords)
            found: list[Tensor] = []
            for step in range(4):
                x = torch.full((6, 700), 0.1 * step)
                for moment in ("a death", "a newcomer") if step == 2 else ():
                    if inside and moment == "a death":
                        kill(executor, 2)
                    elif inside:
                        executor.grow()
                        if midst:
                            arm(tmp_path, "sync" if midst == "leaving" else midst)
                    before = carried()
                    with torch.no_grad():
                        found.append(model(x))
                    if inside and (moment == "a death" or not midst):
                        assert carried() - before < 1_000_000, moment
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
            assert armed(tmp_path) == []
            found += [*model.state_dict().values()]
            for values in optimizer.state_dict()["state"].values():
                found += [value for value in values.values() if isinstance(value, Tensor)]
            results.append([tensor.clone() for tensor in found])
        assert executor.stats().deaths == 1 + bool(midst)
    assert same(*results)


@pytest.mark.long
def test_T5_a_death_where_gradients_stay(exchanging: Executor, tmp_path: Path) -> None:
    """In forward, in backward, after it, and in a step: no bit changes."""
    plan = {1: ["forward 1"], 2: ["backward 0"], 3: ["between"], 5: ["step"]}
    with Executor(["cpu"] * 2, options=Options(in_process=True, threads=1)) as here:
        expected = train_fragile(here, tmp_path, {}, inside=False)
    deaths = exchanging.stats().deaths
    found = train_fragile(exchanging, tmp_path, plan, inside=True)
    assert armed(tmp_path) == []
    assert same(found, expected)
    assert exchanging.stats().deaths >= deaths + 4


def test_T5_gradients_outlive_the_replica_that_made_them(exchanging: Executor) -> None:
    """They are looked at, and a step is made with them, when one of the replicas is gone."""
    results = []
    for inside in (False, True):
        exchanging.grow()
        model, optimizer = small(exchanging, inside=inside)
        advance(model, optimizer, 0)
        torch.manual_seed(1)
        optimizer.zero_grad()
        model(torch.randn(12, 6)).square().sum().backward()
        if inside:
            kill(exchanging, 0)
        grads = [p.grad.mul(1) for p in model.module.parameters() if p.grad is not None]
        optimizer.step()
        advance(model, optimizer, 2)
        results.append([*grads, *[t.clone() for t in model.state_dict().values()]])
        if inside:
            optimizer.close()
    assert same(*results)


@pytest.mark.long
def test_T5_memory_of_gradients_goes_back(exchanging: Executor) -> None:
    """The files that this process and the replicas hold open do not become more."""
    exchanging.grow()  # an earlier test may have ended a replica
    model, optimizer = small(exchanging)
    processes = [os.getpid(), *[one.pid for one in exchanging.replicas()]]
    found = []
    for step in range(24):
        advance(model, optimizer, step)
        if step in (5, 23):
            found.append([len(os.listdir(f"/proc/{process}/fd")) for process in processes])
    assert all(late <= early + 4 for early, late in zip(*found, strict=True)), found


def test_T5_many_backwards_before_a_step(exchanging: Executor) -> None:
    """They hold the memory of some backwards, and not of all; the bits stay."""
    exchanging.grow()  # an earlier test may have ended a replica
    results, held = [], []
    for inside in (False, True):
        model, optimizer = small(exchanging, inside=inside)
        for step in range(2):
            torch.manual_seed(step)
            optimizer.zero_grad()
            for _ in range(11):
                model(torch.randn(4, 6)).square().mean().backward()
                if inside:
                    grads = [p.grad for p in model._master.parameters()]
                    held.append(max(len(getattr(g, "state", g).terms) for g in grads))
            optimizer.step()
        results.append([t.clone() for t in model.state_dict().values()])
    assert same(*results)
    if exchanging.options.link != "collective":
        assert max(held) == 4


def test_T5_what_programs_do_with_gradients_that_stay(exchanging: Executor) -> None:
    """Hooks, a graph that is kept, gradients without ``backward``, edits, many small backwards, and
    backwards of which the gradients are thrown away.
    """
    results = []
    for inside in (False, True):
        model, optimizer = small(exchanging, inside=inside)
        first, *others = [*model.module.parameters()]
        found: list[Tensor] = []
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad(set_to_none=step == 1)
            hook = first.register_hook(lambda grad: grad * 2)
            loss = model(torch.randn(8, 6)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            hook.remove()
            asked = torch.autograd.grad(model(torch.randn(8, 6)).sum(), [first, others[0]])
            for _ in range(6):
                model(torch.randn(4, 6)).abs().mean().backward()
            others[0].grad.mul_(0.5)
            others[1].grad = asked[1].sum() * torch.ones_like(others[1])
            found += [grad.mul(1) for grad in asked]
            found.append(first.grad.norm())
            optimizer.step()
            model(torch.randn(4, 6)).sum().backward()
        results.append([*found, *[t.clone() for t in model.state_dict().values()]])
    assert same(*results)


@pytest.mark.long
def test_T2_gradients_in_shared_memory_outlive_all_replicas(exchanging: Executor) -> None:
    """A step is made with them when others have begun with the same weights. Those that replicas
    had summed among themselves are gone, and that is an error.
    """
    results = []
    for inside in (False, True):
        exchanging.grow()
        model, optimizer = small(exchanging, inside=inside)
        torch.manual_seed(1)
        model(torch.randn(12, 6)).square().sum().backward()
        if inside:
            kill(exchanging, 0, 1)
            exchanging.grow()
        with torch.no_grad():
            model(torch.ones(12, 6))
        if inside and exchanging.options.link == "collective":
            assert isinstance(raised(optimizer.step), StateLost)
            return
        optimizer.step()
        advance(model, optimizer, 2)
        results.append([t.clone() for t in model.state_dict().values()])
    assert same(*results)


@pytest.mark.long
def test_T2_a_newcomer_where_bytes_lie_in_the_message(executors: Any) -> None:
    """It takes over what another replica has passed on, 4 MB of weights."""
    executor = executors(2, link="inline", name="killable")
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = DataParallel(nn.Linear(1000, 1000), executor=executor)
        optimizer = optimizer_of(model, inside, torch.optim.SGD, lr=0.1)
        for step in range(4):
            if inside and step == 2:
                kill(executor, 1)
                executor.grow()
            optimizer.zero_grad()
            model(torch.full((4, 1000), 0.01 * step)).square().mean().backward()
            optimizer.step()
        results.append([t.clone() for t in model.state_dict().values()])
    optimizer.close()
    assert same(*results)


@pytest.mark.long
def test_T2_the_last_holder_dies(killable: Executor) -> None:
    """That is an error that names both steps; training goes on from the last sync."""
    model, optimizer = small(killable, sync_every=2)
    for step in range(3):
        advance(model, optimizer, step)
    assert model.stats().steps_behind == 1
    kill(killable, 0, 1)
    error = raised(model.sync)
    assert isinstance(error, StateLost) and "step 3" in str(error) and "step 2" in str(error)
    found = [*model.state_dict().values()]
    plain, ordinary = small(killable, inside=False)
    for step in range(2):
        advance(plain, ordinary, step)
    assert same(found, [*plain.state_dict().values()])
    advance(model, optimizer, 2)
    advance(plain, ordinary, 2)
    assert same([*model.state_dict().values()], [*plain.state_dict().values()])


@pytest.mark.long
def test_T2_a_backward_after_the_step_is_refused(killable: Executor) -> None:
    """As in one process, also if the graph would have to be made again."""
    for dies in (False, True):
        model, optimizer = small(killable)
        advance(model, optimizer, 0)
        first, second = model(torch.ones(4, 6)), model(torch.ones(4, 6))
        first.sum().backward()
        optimizer.step()
        if dies:
            kill(killable, 1)
        assert "in" in str(raised(second.sum().backward))
        killable.grow()


# --- what the user's code sees ---


def small(
    executor: Executor, inside: bool = True, sync_every: int | None = None
) -> tuple[DataParallel[Any], Any]:
    """A small model and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = DataParallel(net, executor=executor)
    if inside:
        return model, model.optimizer(torch.optim.Adam, lr=0.01, sync_every=sync_every)
    return model, torch.optim.Adam(net.parameters(), lr=0.01)


def advance(model: DataParallel[Any], optimizer: Any, step: int) -> Tensor:
    """One step of training."""
    torch.manual_seed(step)
    optimizer.zero_grad()
    loss: Tensor = model(torch.randn(8, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def reference(executor: Executor, steps: int) -> list[Tensor]:
    """The weights after so many steps of `small`."""
    model, optimizer = small(executor, inside=False)
    for step in range(steps):
        advance(model, optimizer, step)
    return [p.detach().clone() for p in model.parameters()]


READERS: dict[str, Callable[[Any], list[Tensor]]] = {
    "state_dict": lambda model: [*model.state_dict().values()],
    "module": lambda model: [*model.module.parameters()],
    "parameters": lambda model: [*model.parameters()],
    "named_parameters": lambda model: [p for _, p in model.named_parameters()],
    "deepcopy": lambda model: [*copy.deepcopy(model).parameters()],
    "pickle": lambda model: [*pickle.loads(pickle.dumps(model)).parameters()],
    "torch.save": lambda model: saved(model),
    "sync": lambda model: (model.sync(), [*model._master.parameters()])[1],
    "double": lambda model: [p.float() for p in model.double().parameters()],
}


def saved(model: Any) -> list[Tensor]:
    """The weights of a model that was saved and loaded."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return [*torch.load(file, weights_only=False).parameters()]


@pytest.mark.parametrize("reader", READERS)
def test_T3_what_reads_the_master_syncs(reader: str, two: Executor) -> None:
    """Once, and then the statistics say that the master is not behind."""
    expected = reference(two, 3)
    model, optimizer = small(two)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        advance(model, optimizer, step)
    assert same(before, [*model._master.parameters()])
    assert model.stats().steps_behind == 3
    assert same([t.detach() for t in READERS[reader](model)], expected)
    assert model.stats().steps_behind == 0


@pytest.mark.long
def test_T3_closing_the_executor_syncs() -> None:
    """So do the end of its ``with`` and `shutdown`; the optimizer is of no use afterwards."""
    with Executor(["cpu"] * 2) as executor:
        expected = reference(executor, 3)
        model, optimizer = small(executor)
        for step in range(3):
            advance(model, optimizer, step)
    assert same([p.detach() for p in model.parameters()], expected)
    error = raised(optimizer.step)
    assert isinstance(error, ExecutorClosed) and "model.optimizer()" in str(error)
    assert isinstance(raised(lambda: small(executor)), ExecutorClosed)


@pytest.mark.parametrize("how", ["in place", "behind the version", "replaced"])
def test_T3_an_edit_while_the_master_is_behind(how: str, two: Executor) -> None:
    """It is refused, with the way to make it; after a sync it travels as ever."""

    def edit(net: nn.Module) -> None:
        with torch.no_grad():
            weight = net[0].weight  # type: ignore[index]
            if how == "in place":
                weight.mul_(0.5)
            elif how == "behind the version":
                weight.data.mul_(0.5)
            else:
                weight.data = weight.data * 0.5

    model, optimizer = small(two)
    net = model.module
    advance(model, optimizer, 0)
    edit(net)
    error = raised(lambda: advance(model, optimizer, 1))
    assert isinstance(error, StateChanged) and "model.sync()" in str(error)
    model.sync()
    edit(net)
    advance(model, optimizer, 1)
    plain, ordinary = small(two, inside=False)
    advance(plain, ordinary, 0)
    edit(plain.module)
    advance(plain, ordinary, 1)
    assert same([*model.state_dict().values()], [*plain.state_dict().values()])


def test_T3_an_edit_of_large_weights_while_the_master_is_behind(two: Executor) -> None:
    """Where it moves no version, it is refused some forwards later, and before any sync by itself.
    It is compared in parts: the rest of what is trained is 12 MB.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    model = DataParallel(net, executor=two)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.01)

    def advance() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 1000)).mean().backward()
        optimizer.step()

    advance()
    net[2].weight.data[-1, -1] = 5.0
    steps = 0
    with pytest.raises(StateChanged, match=r"model\.sync\(\)"):
        while steps < 8:
            advance()
            steps += 1
    assert 1 <= steps <= 4
    model.sync()
    net[0].weight.data[0, 0] = 5.0  # after a sync all is compared: it travels
    advance()
    assert abs(float(model.state_dict()["module.0.weight"][0, 0]) - 5.0) < 0.1
    advance()
    net[1].weight.data[0, 0] = 5.0
    error = raised(model.state_dict)
    assert isinstance(error, StateChanged) and "model.sync()" in str(error)
    model.sync()


def test_T3_between_the_steps(two: Executor) -> None:
    """Evaluation without gradients, `map`, modes, a scheduler by hand, freezing, a closure, hooks,
    another group, and loading what was saved: all as with the optimizer in the driver.
    """
    found = []
    for inside in (True, False):
        model, optimizer = small(two, inside)
        net = model.module
        seen: list[Any] = []
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("stepped"))
        advance(model, optimizer, 0)
        with torch.no_grad():
            seen.append(model(torch.ones(4, 6)))
        seen += [*model.map([torch.ones(4, 6)])]
        model.eval()
        advance(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 0.1
        net[0].bias.requires_grad_(False)
        saved_state = copy.deepcopy(optimizer.state_dict())
        saved_weights = copy.deepcopy(model.state_dict())
        seen.append(advance(model, optimizer, 2))

        def closure(model: Any = model) -> Tensor:
            model.zero_grad()
            loss: Tensor = model(torch.ones(4, 6)).square().sum()
            loss.backward()
            return loss

        seen.append(optimizer.step(closure))
        optimizer.load_state_dict(saved_state)
        model.load_state_dict(saved_weights)
        seen.append(advance(model, optimizer, 3))
        seen += [optimizer.state[net[2].weight]["exp_avg"].clone()]
        seen += [t.clone() for t in model.state_dict().values()]
        found.append(seen)
    assert [one for one in found[0] if isinstance(one, str)] == ["stepped"] * 5
    for one, other in zip(*found, strict=True):
        assert one == other if isinstance(one, str) else torch.equal(one, other)


def test_T3_another_group_of_parameters(two: Executor) -> None:
    """Added between two steps."""
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
        model = DataParallel(net, executor=two)
        optimizer = optimizer_of(model, inside, torch.optim.Adam, net[1].parameters(), lr=0.01)
        advance(model, optimizer, 0)
        optimizer.add_param_group({"params": [*net[0].parameters()], "lr": 0.1})
        advance(model, optimizer, 1)
        advance(model, optimizer, 2)
        found.append([t.clone() for t in model.state_dict().values()])
    assert same(*found)


def test_T3_fast_ways_and_the_scaler(two: Executor) -> None:
    """Clipping by the optimizer, and torch's gradient scaler."""
    found = []
    for inside in (True, False):
        model, optimizer = small(two, inside)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 6) * step).square().sum()).backward()
            scaler.unscale_(optimizer)
            parameters = [*model._master.parameters()]
            if inside:
                found.append(optimizer.grad_norm())
                found.append(optimizer.clip_grad_norm_(0.5))
                optimizer.clip_grad_value_(0.05)
            else:
                found.append(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
                found.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5))
                torch.nn.utils.clip_grad_value_(parameters, 0.05)
            scaler.step(optimizer)
            scaler.update()
        found += [t.clone() for t in model.state_dict().values()]
    half = len(found) // 2
    assert same([torch.as_tensor(t) for t in found[:half]], found[half:])


def test_T3_two_wrappers(two: Executor) -> None:
    """Another wrapper of the module, of a part of it, and on another executor see all steps."""
    model, optimizer = small(two)
    net = model.module
    advance(model, optimizer, 0)
    x = torch.ones(4, 6)
    out = model(x)
    assert torch.equal(DataParallel(net, executor=two)(x), out)
    with Executor(["cpu"], options=Options(in_process=True)) as other:
        assert torch.equal(DataParallel(net[:1], executor=other)(x), net[:1](x))
        assert model.stats().steps_behind == 0
        advance(model, optimizer, 1)
        elsewhere = DataParallel(net, executor=other)(x)
        assert torch.equal(elsewhere, net(x)) and not torch.equal(elsewhere, out)


def test_T3_closing_the_optimizer(two: Executor) -> None:
    """Another one may follow, in the replicas or in the driver."""
    expected = reference(two, 2)
    model, optimizer = small(two)
    advance(model, optimizer, 0)
    assert isinstance(raised(lambda: model.optimizer(torch.optim.SGD, lr=0.1)), RuntimeError)
    state = optimizer.state_dict()
    optimizer.close()
    optimizer.close()
    other = model.optimizer(torch.optim.Adam, lr=0.01)
    other.load_state_dict(state)
    advance(model, other, 1)
    assert same([p.detach() for p in model.parameters()], expected)
    other.close()
    ordinary = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(torch.ones(4, 6))
    advance(model, ordinary, 2)
    assert not torch.equal(model(torch.ones(4, 6)), before)
    assert torch.equal(model(torch.ones(4, 6)), model.module(torch.ones(4, 6)))


# --- what is refused ---


class Meddler(nn.Module):
    """Writes to its weights in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.5)
        return x * self.weight


def test_T4_a_forward_that_writes_to_what_is_trained(two: Executor) -> None:
    """It is refused, and the master is as it was."""
    model = DataParallel(Meddler(), executor=two)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    error = raised(lambda: model(torch.ones(4, 6)))
    assert isinstance(error, StateChanged) and "'weight'" in str(error)
    assert torch.equal(model.module.weight, torch.ones(6))
    optimizer.close()
    assert torch.equal(model(torch.ones(4, 6)), torch.full((4, 6), 0.5))


class Temperamental(nn.Module):
    """Writes to its weights and then raises an exception, in a backward if asked for."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.in_backward = in_backward
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.weight
        if self.in_backward and out.requires_grad:
            out.register_hook(self.spoil)
        elif not self.in_backward and x.sum() < 0:
            self.spoil(x)
        return out

    def spoil(self, grad: Tensor) -> None:
        """Write to the weights, and fail."""
        if grad.sum() < 0:
            self.weight.data.zero_()
            raise ValueError("spoiled")


@pytest.mark.parametrize("in_backward", [False, True])
def test_T4_weights_that_are_spoiled_by_a_failure(in_backward: bool, two: Executor) -> None:
    """Of a module that writes to its weights and raises, no replica goes on with what it wrote."""
    model = DataParallel(Temperamental(in_backward), executor=two)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1, sync_every=1)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    expected = model.state_dict()["module.weight"].clone()
    with torch.no_grad() if not in_backward else torch.enable_grad():
        error = raised(lambda: model(-torch.ones(4, 6)).sum().neg().backward())
    assert "spoiled" in str(error)
    assert torch.equal(model(torch.ones(4, 6)).detach(), expected.expand(4, 6))
    assert torch.equal(model.module.weight, expected)


class Unsendable(torch.optim.SGD):
    """Its keyword arguments cannot be pickled."""

    def __init__(self, params: Any, lr: float, lock: Any) -> None:
        super().__init__(params, lr=lr)


def in_place(net: nn.Module) -> DataParallel[Any]:
    """A wrapper that runs its module in this process."""
    model = DataParallel(net, ["cpu"])
    model.device_ids = []
    return model


def test_T4_nonsense(two: Executor) -> None:
    """Each is an error that says what to do."""
    model, first = small(two)
    first.close()
    net = model.module
    sgd = torch.optim.SGD
    for call, kind, text in (
        (lambda: model.optimizer(torch.optim.LBFGS), TypeError, "evaluates the model"),
        (
            lambda: model.optimizer(nn.Linear, lr=1),  # type: ignore[arg-type]
            TypeError,
            "class of optimizers",
        ),
        (lambda: model.optimizer(sgd, nn.Linear(2, 2).parameters(), lr=1), ValueError, "wrapped"),
        (lambda: model.optimizer(sgd, [], lr=1), ValueError, "empty"),
        (lambda: model.optimizer(sgd, lr=-1), ValueError, "learning rate"),
        (lambda: model.optimizer(sgd, lr=1, sync_every=0), ValueError, "sync_every"),
        (lambda: model.optimizer(sgd, lr=1, differentiable=True), ValueError, "differentiable"),
        (
            lambda: model.optimizer(Unsendable, lr=1, lock=open(os.devnull)),  # noqa: SIM115
            TypeError,
            "optimizer",
        ),
        (lambda: in_place(net).optimizer(sgd, lr=1), RuntimeError, "in place"),
    ):
        error = raised(call)
        assert isinstance(error, kind) and text in str(error), (text, error)
    optimizer = model.optimizer(sgd, lr=0.1)
    assert isinstance(optimizer, ReplicaOptimizer)
    with Executor(["cpu"], options=Options(in_process=True)) as other:
        elsewhere = DataParallel(net, executor=other)
        assert "already" in str(raised(lambda: elsewhere.optimizer(sgd, lr=1)))
    assert "state_dict()" in str(raised(lambda: pickle.dumps(optimizer)))
    assert "state_dict()" in str(raised(lambda: copy.deepcopy(optimizer)))
    advance(model, optimizer, 0)
    net[0].weight = nn.Parameter(torch.zeros(8, 6))
    assert "no longer in the module" in str(raised(lambda: advance(model, optimizer, 1)))
