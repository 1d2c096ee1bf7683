"""Run by test_cluster.py in its own process: a head without GPUs, the driver on it, two nodes with one each."""

from __future__ import annotations

import copy

import ray
import torch
from ray.cluster_utils import Cluster
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel import DataParallel, Options, PlacementError


class Net(nn.Module):
    """Two layers, batch norm and dropout; wide enough that its weights do not ride inside a message."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 4000), nn.BatchNorm1d(4000), nn.Linear(4000, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.dropout(torch.relu(self.norm(self.one(x))), 0.5, self.training))


def train(model: nn.Module, steps: int) -> list[Tensor]:
    """Losses and final weights."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    kept = []
    for step in range(steps):
        x = torch.linspace(-1, 1, 96).view(12, 8) + step
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())
    return [*kept, *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def same(one: list[Tensor], other: list[Tensor]) -> None:
    """To the bit."""
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def main() -> None:
    """Everything in one cluster, for starting one takes long."""
    torch.set_num_threads(1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    workers = [cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    torch.manual_seed(0)
    net = Net()
    here = DataParallel(copy.deepcopy(net), ["cpu", "cpu"], options=Options(in_process=True, threads=1))
    expected = train(here, 4)

    model = DataParallel(copy.deepcopy(net))
    assert model.device_ids == [0, 1]
    same(train(model, 4), expected)
    infos = model.executor.replicas()
    nodes = {info.node_id for info in infos}
    assert len(nodes) == 2
    assert ray.get_runtime_context().get_node_id() not in nodes
    print("two nodes train as one process does")

    spread = DataParallel(copy.deepcopy(net), ["cpu"] * 3)
    assert spread(torch.ones(6, 8)).shape == (6, 2)
    seats = spread.executor.seats(spread.device_ids)
    assert len({seat.info().node_id for seat in seats}) == 3
    assert seats[0].info().node_id == ray.get_runtime_context().get_node_id()
    print("cpu replicas are spread, the driver's node first")

    by_store = DataParallel(copy.deepcopy(net), [0, 1], options=Options(link="object_store"))
    raydp_parallel.shutdown()  # frees the GPUs for the next executor
    same(train(by_store, 4), expected)
    print("the object store alone gives the same")

    lost = next(n for n in workers if n.node_id == by_store.executor.replicas()[1].node_id)
    out = by_store(torch.ones(4, 8))
    cluster.remove_node(lost)
    out.sum().backward()  # half of its graph was there
    by_store.module.load_state_dict(net.state_dict())
    same(train(by_store, 4), expected)
    stats = by_store.executor.stats()
    assert stats.deaths == 1 and stats.replays >= 1
    print("a node is lost, and training gives the same")
    raydp_parallel.shutdown()
    try:
        DataParallel(copy.deepcopy(net), [0, 1])(torch.ones(4, 8))
    except PlacementError as error:
        print("PlacementError", error)
    alone = DataParallel(copy.deepcopy(net), [0], options=Options(link="object_store"))
    assert alone(torch.ones(4, 8)).shape == (4, 2)
    print("the other node goes on")
    raydp_parallel.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
