"""`DataParallel.no_sync`: gradients that stay in the replicas while they are accumulated."""

from __future__ import annotations

import contextlib
import copy
import operator
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accumulating import HERE, assert_alike, backward, batch, lie, lie_based, lose, small
from mortal import Everything, Mortal, arm, armed, rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raydp_parallel import DataParallel, Executor, Options, cluster, convert_sync_batchnorm
from raydp_parallel.calls.held_gradients import HeldGradients, HeldPass
from raydp_parallel.errors import GraphLost, StateChanged
from raydp_parallel.state.tracker import ModuleTracker


@pytest.fixture
def joined(executors: Any) -> Executor:
    """Two replicas that sum gradients among themselves."""
    return executors(link="collective", name="killable")  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_X7_sums_are_made_over_backwards_and_then_over_chunks(executors: Any, chunks: int) -> None:
    """To the bit, in single precision; the gradient is an ordinary one in the end."""
    net = nn.Sequential(nn.Linear(5, 80), nn.Tanh(), nn.Linear(80, 2))
    executor = executors(chunks)
    plain = [DataParallel(copy.deepcopy(net), ["cpu"], executor=executor) for _ in range(chunks)]
    model = DataParallel(net, executor=executor)
    batches = [torch.randn(chunks * 2, 5) for _ in range(4)]
    for number, x in enumerate(batches):
        backward(model, x, number < 3)
        assert lie(net) == [number < 3] * 4
        for one, part in zip(plain, x.chunk(chunks), strict=True):
            backward(one, part)
    for name, parameter in net.named_parameters():
        grads = [one.module.get_parameter(name).grad for one in plain]
        total = grads[0]
        for grad in grads[1:]:
            assert total is not None and grad is not None
            total = total + grad
        assert type(parameter.grad) is Tensor
        assert torch.equal(parameter.grad, total)  # type: ignore[arg-type]


def test_X7_nothing_travels_until_the_end(two: Executor) -> None:
    """As the replicas' statistics count it: then the gradients do, once."""
    net = nn.Linear(300, 400, bias=False)
    model = DataParallel(net, executor=two)
    sent = []
    for hold in (True, True, True, False):
        with model.no_sync() if hold else contextlib.nullcontext():
            loss = model(torch.randn(4, 300)).sum()
        before = two.stats()
        loss.backward()
        after = two.stats()
        sent += [
            late.bytes_out - early.bytes_out
            for early, late in zip(before.replicas[:2], after.replicas[:2], strict=True)
        ]
    assert sent == [0] * 6 + [300 * 400 * 4] * 2


@pytest.mark.long
@pytest.mark.parametrize("moment", ["forward 0", "backward 0", "backward 1", "late forward 1"])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_X7_a_death_changes_no_bit(
    killable: Executor, tmp_path: Path, moment: str, when: int
) -> None:
    """Dropout, batch norm and a checkpoint: what was accumulated is made again."""
    found = []
    for deadly in (False, True):
        torch.manual_seed(3)
        net = Everything(checkpointed=True)
        model = DataParallel(Mortal(net, tmp_path), executor=killable)
        for number in range(3):
            with model.no_sync() if number < 2 else contextlib.nullcontext():
                if deadly and number == when:
                    arm(tmp_path, moment)
                loss = model(rows(2, number)).square().sum()
            loss.backward()
        found.append([p.grad for p in net.parameters()] + [*net.buffers()])
        killable.grow()
    assert not armed(tmp_path)
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["fetch", "answer"])
def test_X7_what_was_lost_is_made_again_where_it_is_used(
    killable: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Without a backward outside, after a death; and after Ctrl-C as an answer was there."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain, model = copy.deepcopy(net), DataParallel(Mortal(net, tmp_path), executor=killable)
    for number in range(2):
        backward(model, rows(2, number), hold=True)
        backward(plain, rows(2, number)[:, 1:])
    if moment == "fetch":
        lose(model, tmp_path, 0)
    else:
        run = Executor.run

        def interrupted(self: Executor, jobs: Any, meanwhile: Any = None) -> Any:
            answers = run(self, jobs, meanwhile)
            if jobs[0].method == "backward":
                monkeypatch.undo()
                raise KeyboardInterrupt
            return answers

        monkeypatch.setattr(Executor, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backward(model, rows(2, 2))
        assert all(lie(net))
        backward(model, rows(2, 3))
        backward(plain, rows(2, 3)[:, 1:])
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.clone(), q.grad)  # type: ignore[union-attr]


@pytest.mark.long
def test_X7_what_cannot_be_made_again_is_refused(killable: Executor, tmp_path: Path) -> None:
    """After a change of the weights; zeros begin anew."""
    net = nn.Linear(6, 3)
    model = DataParallel(Mortal(net, tmp_path), executor=killable)
    backward(model, rows(2, 0), hold=True)
    with torch.no_grad():
        net.weight.mul_(2)
    lose(model, tmp_path, 1)
    killable.grow()
    with pytest.raises(StateChanged, match=r"weight.* was changed"):
        net.weight.grad.sum()  # type: ignore[union-attr]
    with pytest.raises(StateChanged, match=r"weight.* was changed"):
        backward(model, rows(2, 1))
    model.zero_grad()
    backward(model, rows(2, 2), hold=True)
    backward(model, rows(2, 2))
    expected = nn.Linear(6, 3)
    expected.load_state_dict(net.state_dict())
    (2 * expected(rows(2, 2)[:, 1:]).square().sum()).backward()
    torch.testing.assert_close(net.weight.grad, expected.weight.grad)


def test_X7_a_backward_that_fails_takes_nothing_with_it(two: Executor) -> None:
    """What was accumulated before is there for the next one."""
    net, fails = small(), []

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, fail: bool) -> Tensor:
            out: Tensor = self.net(x)
            if fail and float(x[0, 0]) == float(batch(1)[3, 0]):  # chunk 1
                out.register_hook(lambda _: 1 / 0)
            return out

    plain, model = copy.deepcopy(net), DataParallel(Failing(), executor=two)
    for fail in (False, True, True, False):
        for hold in (True, False) if fail else (not fails,):
            with model.no_sync() if hold else contextlib.nullcontext():
                loss = model(batch(1), fail).square().sum()
            if fail:
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                assert any(lie(net))
            else:
                loss.backward()
                backward(plain, batch(1))
        fails.append(fail)
    assert_alike(net, plain)


def random_program(seed: int, net: nn.Module, model: DataParallel[Any]) -> Iterator[str]:
    """Do the same to a wrapped module and to a plain one, in steps; ends with alike gradients."""
    choose, plain = random.Random(seed), copy.deepcopy(net)
    kept: list[tuple[Tensor, Tensor]] = []
    both = (net, plain)

    def on_both(act: Callable[[nn.Module, nn.Module], object], hold: bool) -> None:
        with model.no_sync() if hold else contextlib.nullcontext():
            act(model, net)
        act(plain, plain)

    for number in range(14):
        x, hold = batch(number, choose.choice([6, 6, 6, 1])), choose.random() < 0.7
        what = choose.choice(
            ["backward"] * 6
            + ["zero", "none", "scale", "keep", "clone", "read", "grad", "twice", "some", "step"]
            + ["two", "penalty", "create", "outside", "dense", "freeze", "set"]
        )
        yield what
        if what == "backward":
            backward(model, x, hold)
            backward(plain, x)
        elif what in ("zero", "none"):
            for one in both:
                one.zero_grad(set_to_none=what == "none")
        elif what == "scale":
            for one in both:
                for p in one.parameters():
                    if p.grad is not None:
                        p.grad.mul_(0.5)
        elif what in ("keep", "clone"):
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                if p.grad is not None and q.grad is not None:
                    pair = p.grad, q.grad
                    if what == "clone":
                        pair = p.grad.clone(), q.grad.clone()
                    kept.append(pair)
        elif what == "read":
            assert_alike(net, plain)
        elif what == "grad":
            params = [p for p in net.parameters() if p.requires_grad]
            others = [p for p in plain.parameters() if p.requires_grad]
            with model.no_sync() if hold else contextlib.nullcontext():
                loss = model(x).square().sum()
            found = torch.autograd.grad(loss, params)
            for one, other in zip(
                found, torch.autograd.grad(plain(x).square().sum(), others), strict=True
            ):
                torch.testing.assert_close(one, other)
        elif what == "twice":

            def twice(run: nn.Module, _: nn.Module, x: Tensor = x) -> None:
                loss = run(x).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()

            on_both(twice, hold)
        elif what == "some":

            def some(run: nn.Module, own: nn.Module, x: Tensor = x) -> None:
                first = next(p for p in own.parameters() if p.requires_grad)
                run(x).square().sum().backward(inputs=[first])

            on_both(some, hold)
        elif what == "step":
            for one in both:
                torch.optim.SGD(one.parameters(), lr=0.1).step()
        elif what == "two":

            def two_calls(run: nn.Module, _: nn.Module, x: Tensor = x) -> None:
                (run(x).square().sum() + run(2 * x).sum()).backward()

            on_both(two_calls, hold)
        elif what == "penalty":

            def penalty(run: nn.Module, _: nn.Module, x: Tensor = x) -> None:
                y = x.clone().requires_grad_()
                (found,) = torch.autograd.grad(run(y).square().sum(), y, create_graph=True)
                found.square().sum().backward()

            on_both(penalty, hold)
        elif what == "create":

            def create(run: nn.Module, own: nn.Module, x: Tensor = x) -> None:
                run(x).square().sum().backward(create_graph=True)
                for p in own.parameters():
                    p.grad = None if p.grad is None else p.grad.detach()

            on_both(create, hold)
        elif what == "outside":

            def outside(run: nn.Module, own: nn.Module, x: Tensor = x) -> None:
                (run(x).square().sum() + next(own.parameters()).square().sum()).backward()

            on_both(outside, hold)
        elif what == "dense":
            for one in both:
                for p in one.parameters():
                    p.grad = torch.ones_like(p)
        elif what == "freeze":
            at = choose.randrange(3)
            for one in both:
                p = [*one.parameters()][at]
                p.requires_grad_(not p.requires_grad)
        else:
            for one in both:
                for p in one.parameters():
                    p.grad = p.grad
    backward(model, batch(99))
    backward(plain, batch(99))
    assert_alike(net, plain)
    for one, other in kept:
        torch.testing.assert_close(one.clone(), other, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize(
    "seed", [*range(30), *[pytest.param(seed, marks=pytest.mark.long) for seed in range(30, 60)]]
)
def test_X7_gradients_are_what_they_were_without_it(seed: int) -> None:
    """Whatever a program does to them between."""
    net = small()
    model = DataParallel(net, ["cpu", "cpu"], options=HERE)
    for _ in random_program(seed, net, model):
        pass


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize(
    "seed", [60, 61, *[pytest.param(seed, marks=pytest.mark.long) for seed in range(62, 66)]]
)
@pytest.mark.parametrize("group", [False, True])
def test_X7_gradients_are_what_they_were_in_processes(
    request: pytest.FixtureRequest, seed: int, group: bool
) -> None:
    """The same in replicas of their own, that sum gradients among themselves or not."""
    net = small()
    model = DataParallel(net, executor=request.getfixturevalue("joined" if group else "two"))
    for _ in random_program(seed, net, model):
        pass


def test_X7_a_gradient_s_memory_is_added_to(two: Executor) -> None:
    """A flat buffer that gradients are views of sees each backward, as with torch: these travel at
    once.
    """
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two)
    flat = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    at = 0
    for p in net.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    first = net[0].weight.grad
    for number in range(3):
        backward(model, batch(number), hold=number < 2)
        backward(plain, batch(number))
        expected = torch.cat([p.grad.flatten() for p in plain.parameters()])  # type: ignore[union-attr]
        torch.testing.assert_close(flat, expected)
    assert net[0].weight.grad is first


@pytest.mark.parametrize("show", [operator.methodcaller("numpy"), torch.from_dlpack, copy.copy])
def test_X7_what_shows_a_gradient_s_memory_sees_each_backward(show: Any) -> None:
    """As with torch: arrays, tensors that were exchanged, and shallow copies."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, ["cpu", "cpu"], options=HERE)
    shown: list[Any] = []
    for number in range(4):
        backward(model, batch(number), hold=number < 3)
        backward(plain, batch(number))
        shown = shown or [show(one[0].weight.grad) for one in (net, plain)]
        found, expected = map(torch.as_tensor, shown)
        torch.testing.assert_close(found.clone(), expected)
    assert_alike(net, plain)


def test_X7_zeros_that_are_kept_are_added_to(two: Executor) -> None:
    """A gradient in this process that nothing else refers to does not make others travel."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two)
    for number in range(6):
        backward(model, batch(number), hold=number % 3 < 2)
        backward(plain, batch(number))
        assert lie_based(net) == [number % 3 < 2] * 4
        if number == 2:
            for one in (net, plain):
                one.zero_grad(set_to_none=False)
    assert_alike(net, plain)


def test_X7_a_step_fetches_what_was_left(two: Executor) -> None:
    """An optimizer's step without a backward outside has all gradients."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two)
    for one, run in ((net, model), (plain, plain)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for number in range(4):
            backward(run, batch(number), hold=True) if run is model else backward(
                run, batch(number)
            )
            if number % 2:
                nn.utils.clip_grad_norm_(one.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def halve(parameter: Tensor) -> None:
    """A hook that changes a gradient."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_hooks_see_each_gradient(two: Executor) -> None:
    """Those of parameters, as with torch: such gradients travel at once."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two)
    seen: dict[bool, list[Tensor]] = {True: [], False: []}
    for one in (net, plain):
        one[0].weight.register_hook(lambda g, one=one: seen[one is net].append(g.clone()))
        one[0].bias.register_hook(lambda g: g * 2)
        one[2].bias.register_post_accumulate_grad_hook(halve)
    for number in range(3):
        backward(model, batch(number), hold=number < 2)
        assert lie(net) == [False, False, number < 2, False]
        backward(plain, batch(number))
    assert_alike(net, plain)
    for p, q in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(p, q)


class Partly(nn.Module):
    """Uses some of its parameters, by a word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.tied = nn.Linear(5, 5).double()
        self.tied.weight = self.a.weight
        self.table = nn.Embedding(7, 5, sparse=True).double()

    def forward(self, x: Tensor, which: str) -> Tensor:
        for letter in which:
            if letter == "s":
                x = x + self.table((x[:, 0] > 0).long())
            elif letter == "c":
                x = checkpoint(self.b, x, use_reentrant=True)
            else:
                x = {"a": self.a, "b": self.b, "t": self.tied}[letter](x)
        return x


@pytest.mark.parametrize("unused", ["zeros", "none"])
def test_unused_tied_and_sparse_parameters(two: Executor, unused: Any) -> None:
    """Those that no backward reached get zeros, or nothing; sparse gradients travel at once."""
    net = Partly()
    plain, model = (
        copy.deepcopy(net),
        DataParallel(net, executor=two, options=Options(unused_grads=unused)),
    )
    for number, which in enumerate(["a", "b", "at", "abc", "s", "as", "a"]):
        for run in (model, plain):
            hold = run is model and number < 6
            with model.no_sync() if hold else contextlib.nullcontext():
                out = run(batch(number), which)
            out.square().sum().backward()
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        if q.grad is None:
            assert (p.grad is None) == (unused == "none"), name
        else:
            assert p.grad is not None
            torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense())
    assert net.table.weight.grad is not None
    assert net.table.weight.grad.is_sparse == (unused == "none")


class Added(nn.Module):
    """Both parameters' gradients are views of the output's, where a chunk has one row."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(5))
        self.other = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one.view(1, -1) + self.other.view(1, -1)


@pytest.mark.parametrize("size", [2, 6])
def test_X7_gradients_that_torch_gives_the_same_memory(size: int) -> None:
    """Each is added to by itself."""
    net = Added().double()
    model, parameters = DataParallel(net, ["cpu", "cpu"], options=HERE), [*net.parameters()]
    sums = [torch.zeros_like(p) for p in parameters]
    for number in range(4):
        x = batch(number, size)
        found = torch.autograd.grad(net(x).square().sum(), parameters)
        for one, grad in zip(sums, found, strict=True):
            one += grad
        backward(model, x, hold=number < 3)
    for parameter, one in zip(parameters, sums, strict=True):
        torch.testing.assert_close(parameter.grad, one)


def test_several_models_and_wrappers_share_replicas(executors: Any) -> None:
    """Each accumulates for itself; a second wrapper of a module goes on where the first was."""
    three = executors(3)
    nets = [small(), small()]
    plain = copy.deepcopy(nets)
    models = [DataParallel(net, ["cpu", "cpu"], executor=three) for net in nets]
    again = DataParallel(nets[0], executor=three)
    for number in range(3):
        for model, one in zip(models, plain, strict=True):
            backward(model, batch(number), hold=True)
            backward(one, batch(number))
    backward(again, batch(7), hold=True)
    backward(plain[0], batch(7))
    for model, one in zip(models, plain, strict=True):
        backward(model, batch(9))
        backward(one, batch(9))
    for net, one in zip(nets, plain, strict=True):
        assert_alike(net, one)


def test_a_forward_outside_says_nothing_about_gradients_that_stay(
    two: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may just have said that some do, and its gradients would be lost."""
    said: list[bool] = []
    holds = property(lambda _: False, lambda _, value: said.append(value))
    monkeypatch.setattr(ModuleTracker, "holds", holds, raising=False)
    model = DataParallel(small(), executor=two)
    backward(model, batch(0))  # makes the tracker
    said.clear()
    backward(model, batch(0))
    assert said == []
    backward(model, batch(0), hold=True)
    assert said == [True]


def accumulate_in_threads(model: DataParallel, plain: nn.Module, seed: int) -> None:
    """Four threads accumulate into one module, in and out of the context, some into some of its
    parameters only; the plain module does the same.
    """
    choose = random.Random(seed)
    jobs = [
        [(choose.random() < 0.7, choose.choice([None, None, (0, 2), (1,)])) for _ in range(5)]
        for _ in range(4)
    ]
    failed: list[BaseException] = []

    def run(net: nn.Module, number: int, turn: int) -> None:
        hold, rows = jobs[number][turn]
        own = [*(net.module if isinstance(net, DataParallel) else net).parameters()]
        stays = hold and isinstance(net, DataParallel)
        with net.no_sync() if stays else contextlib.nullcontext():  # type: ignore[operator]
            loss = net(batch(10 * number + turn)).square().sum()
        loss.backward(inputs=None if rows is None else [own[row] for row in rows])

    def work(number: int) -> None:
        try:
            for turn in range(5):
                run(model, number, turn)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    for number in range(4):
        for turn in range(5):
            run(plain, number, turn)
    backward(model, batch(99))
    backward(plain, batch(99))
    assert_alike(model.module, plain)


def test_threads_lose_nothing(two: Executor) -> None:
    """In whatever order their backwards run."""
    net = small()
    accumulate_in_threads(DataParallel(net, executor=two), copy.deepcopy(net), 0)


@pytest.mark.long
def test_threads_that_take_turns_anywhere_lose_nothing() -> None:
    """Python changes threads at nearly each instruction, so that what is not one step falls apart:
    to read a gradient and to set another one, or to fetch one and to add to it.
    """
    interval = sys.getswitchinterval()
    executor = Executor(["cpu", "cpu"], options=Options(in_process=True, threads=1))
    sys.setswitchinterval(1e-6)
    try:
        for seed in range(150):
            net = small()
            accumulate_in_threads(DataParallel(net, executor=executor), copy.deepcopy(net), seed)
    finally:
        sys.setswitchinterval(interval)
        executor.close()


def test_it_nests_and_ends_with_an_exception(two: Executor) -> None:
    """As one leaves it, the next forward is an ordinary one."""
    net = small()
    model = DataParallel(net, executor=two)
    with model.no_sync():
        with model.no_sync():
            pass
        model(batch(0)).sum().backward()
    assert all(lie(net))
    net.zero_grad()
    with pytest.raises(ValueError, match="mine"), model.no_sync():
        raise ValueError("mine")
    model(batch(0)).sum().backward()
    assert not any(lie(net))


def test_forward_decides(two: Executor) -> None:
    """As with DistributedDataParallel: backward may run outside, or inside."""
    net = small()
    model = DataParallel(net, executor=two)
    with model.no_sync():
        loss = model(batch(0)).sum()
    loss.backward()
    assert all(lie(net))
    outside = model(batch(1)).sum()
    with model.no_sync():
        outside.backward()
    assert not any(lie(net))


def test_copies_and_pickles_have_the_gradients(two: Executor) -> None:
    """Of the module, and of a gradient."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two)
    backward(model, batch(0), hold=True)
    backward(plain, batch(0))
    torch.testing.assert_close(copy.deepcopy(net[0].bias.grad), plain[0].bias.grad)
    backward(model, batch(1), hold=True)
    backward(plain, batch(1))
    grad = pickle.loads(pickle.dumps(net[0].weight.grad))
    torch.testing.assert_close(grad, plain[0].weight.grad)
    assert type(grad) is Tensor


def test_gradients_of_inputs_travel(two: Executor) -> None:
    """They belong to this process's graph."""
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=two)
    before = nn.Linear(5, 5).double()
    other = copy.deepcopy(before)
    for number in range(2):
        with model.no_sync():
            model(before(batch(number))).square().sum().backward()
        plain(other(batch(number))).square().sum().backward()
        assert all(lie(net))
    assert_alike(before, other)
    backward(model, batch(5))
    backward(plain, batch(5))
    assert_alike(net, plain)


def test_narrow_gradients_are_rounded_once(two: Executor) -> None:
    """The sum over backwards is made in the parameter's dtype before."""
    net = nn.Linear(40, 60)
    plain = copy.deepcopy(net)
    model = DataParallel(net, ["cpu"], executor=two, options=Options(gradient_dtype=torch.bfloat16))
    for number in range(3):
        x = torch.randn(6, 40)
        backward(model, x, hold=number < 2)
        backward(plain, x)
    assert plain.weight.grad is not None and net.weight.grad is not None
    assert torch.equal(net.weight.grad, plain.weight.grad.bfloat16().float())


def test_with_synchronised_batch_norm(two: Executor) -> None:
    """Chunks exchange tensors in each backward; what they accumulate stays."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    plain = copy.deepcopy(net)
    model = DataParallel(convert_sync_batchnorm(net), executor=two)
    for number in range(3):
        backward(model, batch(number), hold=number < 2)
        assert lie(net) == [number < 2] * 6
        backward(plain, batch(number))
    assert_alike(net, plain)


@pytest.mark.parametrize("group", [False, True])
def test_an_optimizer_in_the_replicas_gets_all_gradients(
    request: pytest.FixtureRequest, group: bool
) -> None:
    """Whether or not the last backward is outside."""
    executor = request.getfixturevalue("joined" if group else "two")
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, executor=executor)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.1)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number in range(6):
        backward(model, batch(number), hold=number != 2)
        backward(plain, batch(number))
        if number in (2, 4):
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
    model.sync()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert_alike(net, plain)
    optimizer.close()


@pytest.mark.long
def test_with_faults_raised_a_death_loses_them(executors: Any, tmp_path: Path) -> None:
    """And the error says what to do."""
    executor = executors(on_fault="raise")
    net = nn.Linear(6, 3)
    model = DataParallel(Mortal(net, tmp_path), executor=executor)
    backward(model, rows(2, 0), hold=True)
    arm(tmp_path, "forward 1")
    with pytest.raises(Exception, match="died in forward"):
        model(rows(2, 1))
    with pytest.raises(GraphLost, match="accumulated under no_sync"):
        backward(model, rows(2, 1))
    net.zero_grad()
    backward(model, rows(2, 1))


def test_in_place_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no traffic."""
    monkeypatch.setattr(cluster, "all_gpus", lambda options: [])
    net = small()
    model = DataParallel(net)
    assert model.device_ids == []
    backward(model, batch(0), hold=True)
    assert type(net[0].weight.grad) is Tensor


def test_X7_weights_of_another_shape_do_not_mix_with_old_gradients() -> None:
    """The backward fails, as with torch; what was left of the old ones goes nowhere else."""
    net = small()
    model = DataParallel(net, ["cpu", "cpu"], options=HERE)
    backward(model, batch(0), hold=True)
    last = net[2]
    last.weight.data = torch.randn(3, 8, dtype=torch.float64)
    last.bias.data = torch.randn(3, dtype=torch.float64)
    for hold in (False, True):
        with pytest.raises(RuntimeError, match=r"size of tensor|shape"):
            backward(model, batch(1), hold)
    net.zero_grad()
    plain = copy.deepcopy(net)
    backward(model, batch(2))
    backward(plain, batch(2))
    assert_alike(net, plain)


@pytest.mark.long
def test_X7_batches_in_memory_that_is_filled_again(killable: Executor, tmp_path: Path) -> None:
    """What a replica had that died is made of the batches of then, and so are gradients of
    outputs.
    """
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain, model = copy.deepcopy(net), DataParallel(Mortal(net, tmp_path), executor=killable)
    memory, given = rows(2, 0).numpy(), torch.ones(len(rows(2, 0)), 3).numpy()
    x, grad = torch.from_numpy(memory), torch.from_numpy(given)
    for number in range(2):
        memory[:] = rows(2, number).numpy()
        given[:] = number + 1
        with model.no_sync():
            out = model(x)
        out.backward(grad)
        plain(x[:, 1:]).backward(grad)
    memory[:], given[:] = 7, 7
    lose(model, tmp_path, 0)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.clone(), q.grad)  # type: ignore[union-attr]


def test_a_step_fetches_before_it_locks_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch elsewhere holds the gradient's lock, and waits for that of the replicas."""
    net = small()
    model = DataParallel(net, ["cpu", "cpu"], options=HERE)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    backward(model, batch(0), hold=True)
    fetch, locked = HeldGradients._fetch, []

    def watched(self: HeldGradients) -> Any:
        locked.append(self.model.executor.replica_set.lock._is_owned())
        return fetch(self)

    monkeypatch.setattr(HeldGradients, "_fetch", watched)
    optimizer.step()
    assert locked == [False]
    optimizer.close()


def test_threads_that_fetch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of two parameters come with one trip, and a backward that has just looked at them
    takes none along that another thread has fetched.
    """
    net = small()
    plain, model = copy.deepcopy(net), DataParallel(net, ["cpu", "cpu"], options=HERE)
    for number in range(2):
        backward(model, batch(number), hold=True)
        backward(plain, batch(number))
    fits, fetch, trips = HeldPass._fits, HeldGradients._fetch, []

    def counted(self: HeldGradients) -> Any:
        trips.append(1)
        return fetch(self)

    def late(self: HeldPass, *args: Any) -> bool:
        """Another thread uses a gradient just as it was looked at."""
        answer = fits(self, *args)
        if not trips:
            grad = net[2].bias.grad
            thread = threading.Thread(target=lambda: grad.norm())  # type: ignore[union-attr]
            thread.start()
            thread.join()
        return answer

    monkeypatch.setattr(HeldGradients, "_fetch", counted)
    monkeypatch.setattr(HeldPass, "_fits", late)
    backward(model, batch(2))
    backward(plain, batch(2))
    assert trips == [1]
    assert_alike(net, plain)
