"""`convert_sync_batchnorm`: batch norm over the whole batch (pytorch#1051, #38940), compared with
the plain module on the whole batch, in double precision.
"""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_grads, assert_same_state, optimizer_of, raised
from mortal import arm, armed, fate, same, state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raydp_parallel import (
    DataParallel,
    Executor,
    GraphLost,
    GroupBroken,
    Options,
    ReplicaDied,
    SyncBatchNorm,
    convert_sync_batchnorm,
    parallel_apply,
    replicate,
)
from raydp_parallel.transport import collective


class Net(nn.Module):
    """Batch norms of all kinds, one of them in a checkpoint; its process may end on the way."""

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.second = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh())
        self.third = nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4, affine=False))
        self.last = nn.BatchNorm1d(12, track_running_stats=False)
        self.folder = folder

    def forward(self, x: Tensor, chunk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        number = -1 if chunk is None or not len(chunk) else int(chunk[0])
        hidden = checkpoint(self.second, self.first(x), use_reentrant=False)
        self.meet(f"forward {number}")
        out = self.last(self.third(hidden.view(-1, 2, 2, 2)).flatten(1).repeat(1, 3))
        self.meet(f"late forward {number}")
        if out.requires_grad:
            hidden.register_hook(lambda _: self.meet(f"backward {number}"))
        return out, hidden

    def meet(self, moment: str) -> None:
        """Where it may end."""
        if self.folder:
            fate(self.folder, moment)


def pair(executor: Executor, **options: Any) -> tuple[Any, nn.Module]:
    """A converted net in double precision, and a plain one."""
    torch.manual_seed(3)
    plain = Net().double()
    net = convert_sync_batchnorm(copy.deepcopy(plain))
    how = Options(**options)
    return DataParallel(net, executor=executor, options=how), plain


def rows(count: int) -> Tensor:
    """A batch with chunks of different statistics."""
    generator = torch.Generator().manual_seed(count)
    found = torch.randn(count, 3, dtype=torch.double, generator=generator)
    return (found + torch.arange(count).unsqueeze(1)).requires_grad_()


def close(one: Any, other: Any) -> None:
    """Equal but for the order of sums."""
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# --- conversion ---


def test_X3_conversion_keeps_all_but_the_class() -> None:
    """Sharing, hooks, keys, modes and values; no other layer is touched; twice is once."""
    shared = nn.BatchNorm2d(2)
    net = nn.ModuleDict(
        {
            "one": shared,
            "two": nn.Sequential(shared, nn.InstanceNorm2d(2)),
            "s": nn.SyncBatchNorm(2),
        }
    ).eval()
    shared.running_mean.add_(2)  # type: ignore[union-attr]
    ran = []
    shared.register_forward_hook(lambda *_: ran.append(1))
    before = copy.deepcopy(net.state_dict())
    assert convert_sync_batchnorm(convert_sync_batchnorm(net)) is net
    assert net["one"] is shared is net["two"][0] and type(shared) is SyncBatchNorm
    assert type(net["s"]) is SyncBatchNorm and type(net["two"][1]) is nn.InstanceNorm2d
    assert not shared.training
    assert same([*before.values()], [*net.state_dict().values()])
    x = torch.randn(4, 2, 3, 3)
    assert torch.equal(shared(x), nn.functional.batch_norm(x, shared.running_mean, torch.ones(2)))
    assert ran
    alone: nn.Module = nn.BatchNorm1d(3)
    assert type(convert_sync_batchnorm(alone)) is SyncBatchNorm


def test_X3_in_place_it_is_ordinary_batch_norm() -> None:
    """On the CPU too, where torch's own refuses to run; errors are the ordinary ones."""
    plain = Net()
    net = convert_sync_batchnorm(copy.deepcopy(plain))
    x = torch.randn(5, 3)
    for mode in (True, False):
        for one, other in zip(net.train(mode)(x), plain.train(mode)(x), strict=True):
            assert torch.equal(one, other)
    assert_same_state(net, plain, rtol=0, atol=0)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        net.train()(x[:1])
    assert same([*copy.deepcopy(net).parameters()], [*net.parameters()])


def test_X3_what_cannot_be_converted() -> None:
    """Nothing is converted then."""

    class Own(nn.BatchNorm1d):
        """A class of the user's."""

    net = nn.Sequential(nn.BatchNorm1d(3), Own(3))
    with pytest.raises(TypeError, match=r"1 is a Own, a class of its own"):
        convert_sync_batchnorm(net)
    assert type(net[0]) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="the module is lazy"):
        convert_sync_batchnorm(nn.LazyBatchNorm1d())
    with pytest.raises(TypeError, match="expected a module, got list"):
        convert_sync_batchnorm([net])  # type: ignore[type-var]


# --- the same as on the whole batch ---


@pytest.mark.parametrize("weights", [None, (5, 1)], ids=["even", "uneven"])
@pytest.mark.parametrize("count", [9, 2])
def test_X3_training_is_that_of_the_whole_batch(two: Executor, weights: Any, count: int) -> None:
    """Outputs, gradients of weights and inputs, running statistics; a chunk of one row too."""
    model, plain = pair(two, chunk_weights=weights)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain))
    for _ in range(3):
        x, y = rows(count), rows(count)
        for one, other in zip(model(x), plain(y), strict=True):
            close(one, other)
        for module, batch in ((model, x), (plain, y)):
            module.zero_grad()
            sum(out.cos().mean() for out in module(batch)).backward()
        close(x.grad, y.grad)
        assert_same_grads(model, plain, rtol=1e-10, atol=1e-10)
        assert_same_state(model, plain, rtol=1e-10, atol=1e-10)
        ours.step()
        theirs.step()


def test_X3_a_loss_on_a_part_of_the_rows(two: Executor) -> None:
    """What the other chunk has adds to the statistics, and so it gets gradients."""
    model, plain = pair(two)
    x, y = rows(8), rows(8)
    model(x)[0][:3].square().sum().backward()
    plain(y)[0][:3].square().sum().backward()
    assert y.grad is not None and y.grad[4:].abs().min() > 0
    close(x.grad, y.grad)
    assert_same_grads(model, plain, rtol=1e-10, atol=1e-10)


def test_X3_derivatives_of_second_order(two: Executor) -> None:
    """A gradient penalty, and `autograd.grad` for the inputs alone."""
    model, plain = pair(two, chunk_weights=(2, 1))
    x, y = rows(8), rows(8)
    for module, batch in ((model, x), (plain, y)):
        out = module(batch)[0].cos().sum()
        (slope,) = torch.autograd.grad(out, batch, create_graph=True)
        (out + slope.square().sum() + slope[:2].sum()).backward()
    close(x.grad, y.grad)
    assert_same_grads(model, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.long
def test_X3_modes_and_no_grad(two: Executor, killable: Executor) -> None:
    """Without gradients the batch's statistics count as well; in evaluation the running ones."""
    model, plain = pair(two)
    with torch.no_grad():
        close(model(rows(6)), plain(rows(6)))
        assert_same_state(model, plain, rtol=1e-10, atol=1e-10)
        for module in (model.module, plain):
            module.last = nn.Identity()  # which would use the batch's
        model.eval(), plain.eval()
        close(model(rows(6)), plain(rows(6)))
    before = len(two.synced_groups._known)
    known = len(killable.synced_groups._known)
    close(DataParallel(model.module, executor=killable)(rows(6)), plain(rows(6)))
    assert len(killable.synced_groups._known) == known and before
    alone = DataParallel(model.module.train(), ["cpu"], executor=two)
    close(alone(rows(6)), plain.train()(rows(6)))
    with torch.inference_mode():
        close(model(rows(5).detach()), plain(rows(5).detach()))


def test_X3_half_precision_and_autocast(two: Executor) -> None:
    """Statistics are those of float32."""
    net = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    plain = copy.deepcopy(net)
    model = DataParallel(net, executor=two)
    x = rows(8).detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x), plain(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs)
    assert_same_state(model, plain, rtol=1e-4, atol=1e-4)


def test_X3_two_calls_in_one_backward_and_from_two_threads(two: Executor) -> None:
    """Each replica works through the calls in one order."""
    model, plain = pair(two)
    for module in (model, plain):
        (module(rows(6))[0].sum().cos() + module(rows(7))[0].cos().sum()).backward()
    assert_same_grads(model, plain, rtol=1e-10, atol=1e-10)
    found: dict[int, Tensor] = {}

    def work(count: int) -> None:
        for _ in range(5):
            found[count] = model(rows(count))[0]
            found[count].cos().sum().backward()

    threads = [threading.Thread(target=work, args=(count,)) for count in (5, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for count, out in found.items():
        close(out, plain(rows(count))[0])


def test_X3_batches_that_are_split_by_map(two: Executor) -> None:
    """Several calls at once; whole batches are one chunk each."""
    model, plain = pair(two)
    batches = [rows(count) for count in (6, 7, 8)]
    for split in (True, False):
        with torch.no_grad():
            for out, x in zip(model.map(batches, split=split), batches, strict=True):
                close(out, plain(x))


# --- what goes wrong ---


class Fails(nn.Module):
    """Raises in the chunk of the largest rows, between two batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        if float(x.detach().max()) > 50:
            raise KeyError("too large")
        return self.second(out)


def test_X3_an_error_of_one_chunk_is_raised(two: Executor) -> None:
    """The other one does not wait for it, and the next call works."""
    net = convert_sync_batchnorm(Fails())
    plain = copy.deepcopy(net)
    model = DataParallel(net, executor=two)
    x = rows(8).detach().float()
    for shift in (torch.tensor([0.0, 60.0]), torch.tensor([60.0, 0.0])):
        with pytest.raises(KeyError, match="too large"):
            model(x + shift.repeat_interleave(4).unsqueeze(1))
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(model(x), plain(x))
    one = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(one)


class Unlike(nn.Module):
    """Runs another number of batch norms in each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if int(x[0, 0]) else x


def test_X3_chunks_that_differ_do_not_wait_for_each_other(two: Executor) -> None:
    """The error names the chunks that have ended and those that wait; it comes once one of them has
    ended, whatever a replica's patience is.
    """
    model = DataParallel(convert_sync_batchnorm(Unlike()), executor=two)
    error = raised(lambda: model(torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2)))
    assert isinstance(error, GroupBroken), error
    assert "chunks [0] have ended, while chunks [1] wait" in str(error)
    assert model(torch.tensor([[1.0] * 3] * 4)).shape == (4, 3)


class Slow(nn.Module):
    """Its last chunk computes for long after the last batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, chunk: Tensor) -> Tensor:
        out = self.norm(x)
        if int(chunk[0]):
            time.sleep(1.5)
        return out


@pytest.mark.long
def test_X3_a_chunk_that_is_slow_after_its_last_batch_norm(
    two: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not feel that the others have ended long ago."""
    monkeypatch.setattr("raydp_parallel.calls.synced_call._GRACE", 0.1)
    net = convert_sync_batchnorm(Slow())
    plain = copy.deepcopy(net)
    model = DataParallel(net, executor=two)
    x, chunk = rows(8).detach().float(), torch.tensor([0] * 4 + [1] * 4)
    for _ in range(2):
        torch.testing.assert_close(model(x, chunk), plain(x, torch.zeros(8)))


class Falls(nn.Module):
    """Ends its process as a group is joined."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 3:
            return self.norm(x)
        join = collective.Groups.join

        def joining(groups: Any, request: Any) -> str:
            fate(self.folder, f"join {request.rank}")
            return join(groups, request)

        collective.Groups.join = joining  # type: ignore[method-assign]
        return x


@pytest.mark.long
def test_X3_a_death_while_the_group_is_formed(tmp_path: Path) -> None:
    """The call runs once there is another replica."""
    net = convert_sync_batchnorm(Falls(str(tmp_path)))
    plain = copy.deepcopy(net)
    with Executor(["cpu", "cpu"]) as executor:
        model = DataParallel(net, executor=executor)
        model.eval()(torch.zeros(4, 2))
        arm(tmp_path, "join 1")
        x = rows(8).detach().float()
        torch.testing.assert_close(model.train()(x), plain(x))
        assert not armed(tmp_path)
        assert executor.stats().deaths == 1


class Skips(nn.Module):
    """Runs one of two equal batch norms, each chunk another one."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[int(x[0, 0])](x)


def test_X3_chunks_at_different_layers(two: Executor) -> None:
    """They do not mix the statistics of two batch norms."""
    model = DataParallel(convert_sync_batchnorm(Skips()), executor=two)
    error = raised(lambda: model(torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2)))
    assert isinstance(error, GroupBroken) and "different layers" in str(error)
    assert model(torch.tensor([[1.0] * 3] * 4)).shape == (4, 3)


def test_X3_a_batch_norm_of_another_kind_is_refused() -> None:
    """Also one that inherits from torch's own base."""

    class Own(nn.modules.batchnorm._BatchNorm):
        def _check_input_dim(self, input: Tensor) -> None:
            pass

    with pytest.raises(TypeError, match="is a Own, a class of its own"):
        convert_sync_batchnorm(nn.Sequential(Own(3)))


def test_X3_chunks_need_replicas_of_their_own(two: Executor) -> None:
    """Chunks that run one after the other cannot exchange anything."""
    net = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    inside = Options(in_process=True, threads=1)
    model = DataParallel(net, ["cpu", "cpu"], options=inside)
    with pytest.raises(ValueError, match="a replica in a process of its own for each chunk"):
        model(torch.randn(4, 3))
    assert model.eval()(torch.randn(4, 3)).shape == (4, 3)
    net.train()
    one = replicate(net, ["cpu"], executor=two)[0]
    assert one(torch.randn(4, 3)).shape == (4, 3)  # one chunk is the whole batch
    other = replicate(nn.Linear(3, 2), ["cpu"], executor=two)[0]
    with pytest.raises(ValueError, match="apply each module alone"):
        parallel_apply([one, one, other], [torch.randn(4, 3)] * 3)


# --- deaths ---


@pytest.fixture(scope="module")
def undisturbed(executors: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    """What a run gives in which nothing dies."""
    return train(executors(), tmp_path_factory.mktemp("undisturbed"), {})


def train(
    executor: Executor, folder: Path, plan: dict[int, list[str]], inside: bool = False
) -> list[Tensor]:
    """Three steps, arming ``plan[step]`` before each. The losses and the final state."""
    torch.manual_seed(7)
    model = DataParallel(convert_sync_batchnorm(Net(str(folder)).double()), executor=executor)
    optimizer = optimizer_of(model, inside, torch.optim.Adam, lr=0.01)
    losses = []
    for number in range(3):
        arm(folder, *plan.get(number, ()))
        out, hidden = model(rows(8), torch.tensor([0] * 4 + [1] * 4))
        arm(folder, *plan.get(number + 10, ()))
        optimizer.zero_grad()
        loss = out.cos().mean() + hidden.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert not armed(folder)
    return [*losses, *state(model)]


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [{0: ["forward 1"]}, {1: ["late forward 0"]}, {11: ["backward 1"]}, {12: ["backward 0"]}],
    ids=["forward", "late forward", "backward", "backward of chunk 0"],
)
def test_X3_a_death_changes_nothing(
    killable: Executor, undisturbed: list[Tensor], tmp_path: Path, plan: dict[int, list[str]]
) -> None:
    """The others do not wait for it, and all run again once there is another replica, with the same
    bits.
    """
    assert same(train(killable, tmp_path, plan), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [{1: ["late forward 0"]}, {1: ["forward 1"], 11: ["backward 1"]}],
    ids=["forward", "both"],
)
def test_T2_a_death_with_synchronised_batch_norm(
    killable: Executor, tmp_path: Path, plan: dict[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an optimizer in the replicas has made is brought back before a chunk waits for it."""

    def wait(training: Any) -> None:
        assert not training.behind, "the weights were asked for in the midst of a call"

    undisturbed = train(killable, tmp_path, {}, inside=True)
    monkeypatch.setattr("raydp_parallel.calls.training_record.Training._bring_back", wait)
    deaths = killable.stats().deaths
    assert same(train(killable, tmp_path, plan, inside=True), undisturbed)
    assert killable.stats().deaths == deaths + sum(map(len, plan.values()))


@pytest.mark.long
def test_X3_a_graph_that_died_between_two_calls(killable: Executor, tmp_path: Path) -> None:
    """It is made again without the other chunk; a graph of second order cannot be."""
    torch.manual_seed(7)
    net = convert_sync_batchnorm(Net(str(tmp_path)).double())
    model = DataParallel(net, executor=killable)
    chunk = torch.tensor([0] * 4 + [1] * 4)
    found = []
    for dies in (False, True):
        model.zero_grad()
        out = model(rows(8), chunk)[0].cos().sum()
        if dies:
            arm(tmp_path, "forward 1")
            with torch.no_grad():
                model(rows(8), chunk)  # ends the process that has the graph
        out.backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert found[0] and same(*found)
    x = rows(8)
    (slope,) = torch.autograd.grad(model(x, chunk)[0].cos().sum(), x, create_graph=True)
    arm(tmp_path, "forward 1")
    with torch.no_grad():
        model(rows(8), chunk)
    with pytest.raises(GraphLost, match="run forward again"):
        slope.square().sum().backward()


@pytest.mark.long
def test_X3_a_death_is_an_error_if_that_was_asked_for(executors: Any, tmp_path: Path) -> None:
    """With ``on_fault="raise"``; the next call works."""
    executor = executors(on_fault="raise")
    model = DataParallel(convert_sync_batchnorm(Net(str(tmp_path)).double()), executor=executor)
    chunk = torch.tensor([0] * 4 + [1] * 4)
    arm(tmp_path, "forward 1")
    with pytest.raises(ReplicaDied, match="died in forward"):
        model(rows(8), chunk)
    assert model(rows(8), chunk)[0].shape == (8, 12)
