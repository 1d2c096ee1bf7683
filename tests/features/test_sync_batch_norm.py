"""`convert_sync_batchnorm`, compared with the plain module on the whole batch."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Apply, assert_same_grads, assert_same_state, kill, made_of, ones, raised
from mortal import arm, armed, fate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raydp_parallel import DataParallel, Executor, Options, convert_sync_batchnorm
from raydp_parallel.driver.dispatcher import Dispatcher
from raydp_parallel.errors import ReplicaDied
from raydp_parallel.extras.sync_batch_norm import SyncBatchNorm
from raydp_parallel.functional import parallel_apply, replicate


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


def test_X3_conversion_keeps_all_but_the_class() -> None:
    """Sharing, hooks, keys, modes and values; no other layer is touched; twice is once."""
    shared = nn.BatchNorm2d(2)
    two = nn.Sequential(shared, nn.InstanceNorm2d(2))
    net = nn.ModuleDict({"one": shared, "two": two, "s": nn.SyncBatchNorm(2)}).eval()
    shared.running_mean.add_(2)  # type: ignore[union-attr]
    ran = []
    shared.register_forward_hook(lambda *_: ran.append(1))
    before = copy.deepcopy(net.state_dict())
    assert convert_sync_batchnorm(convert_sync_batchnorm(net)) is net
    assert net["one"] is shared is net["two"][0] and type(shared) is SyncBatchNorm
    assert type(net["s"]) is SyncBatchNorm and type(net["two"][1]) is nn.InstanceNorm2d
    assert not shared.training
    assert all(map(torch.equal, before.values(), net.state_dict().values()))
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
    assert all(map(torch.equal, copy.deepcopy(net).parameters(), net.parameters()))


def test_X3_what_cannot_be_converted() -> None:
    """Nothing is converted then."""

    class Own(nn.BatchNorm1d):
        """A class of the user's."""

    net = nn.Sequential(nn.BatchNorm1d(3), Own(3))
    with pytest.raises(TypeError, match="1 is a Own: its forward"):
        convert_sync_batchnorm(net)
    assert type(net[0]) is nn.BatchNorm1d
    with pytest.raises(TypeError, match=r"the module is a LazyBatchNorm1d.* Run a lazy module"):
        convert_sync_batchnorm(nn.LazyBatchNorm1d())
    with pytest.raises(TypeError, match="expected a module, got list"):
        convert_sync_batchnorm([net])  # type: ignore[type-var]


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
    # The last layer has no running statistics.
    for one, other in zip(model.eval()(x), plain.eval()(y), strict=True):
        close(one, other)


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


@made_of(first=lambda: nn.BatchNorm1d(3), second=lambda: nn.BatchNorm1d(3))
def fails(net: Any, x: Tensor) -> Tensor:
    """Raises in the chunk of the largest rows, between two batch norms."""
    out = net.first(x)
    if float(x.detach().max()) > 50:
        raise KeyError("too large")
    return net.second(out)  # type: ignore[no-any-return]


def test_X3_an_error_of_one_chunk_is_raised(two: Executor) -> None:
    """The other one does not wait for it, and the next call works."""
    net = convert_sync_batchnorm(fails())
    plain = copy.deepcopy(net)
    model = DataParallel(net, executor=two)
    x = rows(8).detach().float()
    for shift in (torch.tensor([0.0, 60.0]), torch.tensor([60.0, 0.0])):
        with pytest.raises(KeyError, match="too large"):
            model(x + shift.repeat_interleave(4).unsqueeze(1))
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(model(x), plain(x))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(torch.zeros(1, 3))


def test_X3_chunks_that_differ_do_not_wait_for_each_other(two: Executor) -> None:
    """The error comes once one of them has ended, whatever a replica's patience is."""
    net = Apply(lambda net, x: net.norm(x) if int(x[0, 0]) else x, norm=nn.BatchNorm1d(3))
    model = DataParallel(convert_sync_batchnorm(net), executor=two)
    error = raised(lambda: model(torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2)))
    assert isinstance(error, RuntimeError) and "chunks run different layers" in str(error), error
    assert model(torch.tensor([[1.0] * 3] * 4)).shape == (4, 3)


@pytest.mark.parametrize("frozen", [True, False])
def test_X3_a_chunk_without_a_graph_is_not_waited_for(two: Executor, frozen: bool) -> None:
    """An error says so, if the others' backward needs it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.norm(x).detach() if frozen else net.norm(x)
        return out * net.gain if int(x[0, 0]) else out.detach()

    net = Apply(forward, norm=nn.BatchNorm1d(3), gain=ones(3)).double()
    model = DataParallel(convert_sync_batchnorm(net), executor=two)
    out = model(torch.eye(4, 3, dtype=torch.double, requires_grad=True))
    if frozen:
        out.sum().backward()
        close(net.gain.grad, out[:2].detach().sum(0))
    else:
        with pytest.raises(RuntimeError, match="outputs of a chunk have no graph"):
            out.sum().backward()


def test_X3_chunks_need_replicas_of_their_own(two: Executor) -> None:
    """Chunks that run one after the other cannot exchange anything."""
    net = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    model = DataParallel(net, [0, 0])
    with pytest.raises(ValueError, match="a replica for each chunk"):
        model(torch.randn(4, 3))
    assert model.eval()(torch.randn(4, 3)).shape == (4, 3)
    net.train()
    one = replicate(net, ["cpu"], executor=two)[0]
    assert one(torch.randn(4, 3)).shape == (4, 3)  # one chunk is the whole batch
    other = replicate(nn.Linear(3, 2), ["cpu"], executor=two)[0]
    with pytest.raises(ValueError, match="apply each module alone"):
        parallel_apply([one, one, other], [torch.randn(4, 3)] * 3)


@pytest.mark.parametrize(
    "moment", ["forward 1", pytest.param("backward 0", marks=pytest.mark.long)]
)
def test_X3_a_death_raises(killable: Executor, tmp_path: Path, moment: str) -> None:
    """The other chunk does not wait for it, and the next call works."""
    model = DataParallel(convert_sync_batchnorm(Net(str(tmp_path)).double()), executor=killable)
    chunk = torch.tensor([0] * 4 + [1] * 4)
    model(rows(8), chunk)
    arm(tmp_path, moment)
    with pytest.raises(ReplicaDied):
        model(rows(8), chunk)[0].cos().sum().backward()
    assert not armed(tmp_path)
    killable.grow(120)
    model.zero_grad()
    model(rows(8), chunk)[0].cos().sum().backward()
    assert all(p.grad is not None for p in model.module.first.parameters())


@pytest.mark.timeout(60)
def test_X3_a_death_between_two_calls() -> None:
    """It is found as the replicas meet: nothing has run yet, and another one comes."""
    with Executor(["cpu", "cpu"]) as executor:
        model = DataParallel(convert_sync_batchnorm(nn.BatchNorm1d(3)), executor=executor)
        executor.grow(120)
        kill(executor, 1)
        model(torch.randn(8, 3)).sum().backward()


@pytest.mark.timeout(60)
def test_X3_nobody_waits_for_a_request_that_ctrl_c_has_held_back(
    two: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk that was sent gives up at once, and the next call works."""
    model = DataParallel(convert_sync_batchnorm(nn.BatchNorm1d(3)), executor=two)
    expected = model(rows(8)[:, :3])
    send, sent = Dispatcher.send, []

    def interrupted(self: Dispatcher, *args: Any) -> Any:
        sent.append(args)
        if len(sent) == 2:
            raise KeyboardInterrupt
        return send(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Dispatcher, "send", interrupted)
        model(rows(8)[:, :3])
    assert torch.equal(model(rows(8)[:, :3]), expected)


@made_of(norm=lambda: nn.BatchNorm1d(1))
def hanging(net: Any, x: Tensor) -> Tensor:
    """Never ends for rows of the second chunk."""
    if x[0] > 0:
        threading.Event().wait()
    return net.norm(x)  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.timeout(120)
def test_X3_the_limit_of_a_call_holds() -> None:
    """Also for a chunk that others wait for."""
    with Executor(["cpu", "cpu"], options=Options(call_timeout=3.0)) as executor:
        model = DataParallel(convert_sync_batchnorm(hanging()), executor=executor)
        model(torch.zeros(4, 1))  # a first call has more time
        with pytest.raises(ReplicaDied, match="call_timeout"):
            model(torch.tensor([[0.0], [0.0], [1.0], [1.0]]))
