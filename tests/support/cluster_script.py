"""Run by test_nodes.py in its own process: a head without CPUs and GPUs, the driver on it, nodes
that come and go.

Nodes are all on this machine here. What they do not share is refused to them: memory, because there
are several, and the modules of the driver, by a path that only the driver has.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
from mortal import rows, same
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor, Options, PlacementError

pb: Any = autoscaler_pb2
"""Ray's messages."""

HIDDEN = """
from torch import nn
from hidden.parts import Wide

class Net(nn.Sequential):
    def __init__(self):
        layers = nn.BatchNorm1d(4000), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4000, 2)
        super().__init__(Wide(), *layers)
"""
PARTS = """
from pathlib import Path
from torch import nn

WIDTH = int(Path(__file__).with_name("width.txt").read_text())

class Wide(nn.Linear):
    def __init__(self):
        super().__init__(7, WIDTH)
"""


def hidden(folder: str) -> nn.Module:
    """Two layers, batch norm and dropout, wide enough that the weights do not ride inside a
    message; its package is on a path of this process alone."""
    package = Path(folder, "hidden")
    package.mkdir()
    (package / "__init__.py").write_text(HIDDEN)
    (package / "parts.py").write_text(PARTS)
    (package / "width.txt").write_text("4000")
    sys.path.insert(0, folder)
    import hidden as found

    torch.manual_seed(0)
    return found.Net()


class Held(nn.Module):
    """Stops its process at a chosen moment, once, until the node ends."""

    def __init__(self, body: nn.Module, folder: str) -> None:
        super().__init__()
        self.body, self.folder = body, folder

    def forward(self, x: Tensor) -> Tensor:
        chunk = int(x[0, 0])
        self.hold(f"forward {chunk}")
        out = self.body(x)
        if out.requires_grad:
            out.register_hook(lambda grad: self.hold(f"backward {chunk}"))
        return out

    def hold(self, moment: str) -> None:
        asked = Path(self.folder, moment)
        if asked.exists():
            asked.rename(Path(self.folder, "reached"))
            time.sleep(60)


def train(
    model: Any, chunks: int, steps: int, before: dict[Any, Any] | None = None, inside: bool = False
) -> list[Tensor]:
    """Losses and final state. `before` has what to do before a step's forward, and, under ``(step,
    "backward")``, before its backward. Steps may be made inside of the replicas.
    """
    torch.manual_seed(1)
    keywords = {"lr": 0.05, "momentum": 0.9}
    if inside:
        optimizer = model.optimizer(torch.optim.SGD, **keywords)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **keywords)
    kept = []
    for step in range(steps):
        (before or {}).get(step, int)()
        loss = model(rows(chunks, step)).square().mean()
        (before or {}).get((step, "backward"), int)()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())
    return [*kept, *(t.detach().clone() for t in (*model.parameters(), *model.buffers()))]


def on_cpus(net: nn.Module, chunks: int) -> DataParallel[Any]:
    """The same on CPUs."""
    return DataParallel(copy.deepcopy(net), ["cpu"] * chunks)


def add_node(cluster: Cluster, zone: str | None = None) -> Any:
    """A node with a CPU and a GPU; in a zone with something special, too, and a label."""
    special = {} if zone is None else {"resources": {zone: 1}, "labels": {"zone": zone}}
    return cluster.add_node(num_cpus=1, num_gpus=1, **special)


def nodes_of(executor: Executor) -> list[str]:
    """Where each replica is."""
    return [info.node for info in executor.replicas()]


def two_nodes(net: nn.Module) -> None:
    """Code and weights reach nodes that have neither; CPU replicas leave a head without CPUs alone;
    who asks for more is told what is free.
    """
    with Executor() as executor:
        model, cpus = DataParallel(copy.deepcopy(net), executor=executor), on_cpus(net, 2)
        assert model.device_ids == [0, 1]
        assert same(train(model, 2, 3), train(cpus, 2, 3))
        trained = DataParallel(copy.deepcopy(net), executor=executor)
        assert same(train(trained, 2, 3, inside=True), train(on_cpus(net, 2), 2, 3))
        assert nodes_of(executor) == sorted(nodes_of(executor))
        for found in map(nodes_of, (executor, cpus.executor)):
            assert len({*found}) == 2 and ray.get_runtime_context().get_node_id() not in found
        assert not any(slot.hello.near for slot in executor.slots([0, 1]))
        print("two nodes train as one process does, a package that only the driver has")
        begun = time.monotonic()
        try:
            Executor([0, 1, 2], options=Options(placement_timeout=1))
        except PlacementError as error:
            assert 0.9 < time.monotonic() - begun < 50
            print("PlacementError", error)


def three_nodes(cluster: Cluster, options: Options) -> Executor:
    """A node that is added while replicas wait is used, and the autoscaler knew that they did."""
    made: list[Executor] = []
    thread = threading.Thread(target=lambda: made.append(Executor([0, 1, 2], options=options)))
    thread.start()
    while not (asked := gangs()):
        time.sleep(0.05)
    assert asked == [3], asked
    add_node(cluster, "b")
    thread.join()
    (executor,) = made
    assert len({*nodes_of(executor)}) == 3 and nodes_of(executor) == sorted(nodes_of(executor))
    print("a node that is added meanwhile is used, and the autoscaler knew")
    return executor


def gangs() -> list[int]:
    """How many bundles each group has that waits, as the autoscaler is told."""
    reply = gcs().get_cluster_resource_state(10)
    state = pb.GetClusterResourceStateReply.FromString(reply).cluster_resource_state
    return [len(found.requests) for found in state.pending_gang_resource_requests]


def gcs() -> Any:
    """Ray's own client."""
    return GcsClient(address=ray.get_runtime_context().gcs_address)


def lost_in_each_phase(cluster: Cluster, net: nn.Module, executor: Executor) -> None:
    """Nodes end in forward, in backward, between the two, and between two steps."""
    folder = tempfile.mkdtemp()

    def end(replica: int) -> None:
        ids = {node.node_id: node for node in cluster.worker_nodes}
        cluster.remove_node(ids[nodes_of(executor)[replica]])

    def end_in(moment: str, replica: int) -> None:
        Path(folder, moment).touch()
        threading.Thread(target=when_reached, args=(replica,)).start()

    def when_reached(replica: int) -> None:
        while not Path(folder, "reached").exists():
            time.sleep(0.01)
        Path(folder, "reached").unlink()  # first: the next one that ends must not find it
        end(replica)

    def heal() -> None:
        add_node(cluster)
        add_node(cluster)
        assert executor.grow() == 2
        assert len({*nodes_of(executor)}) == 3

    model = DataParallel(Held(copy.deepcopy(net), folder), executor=executor)
    plan = {
        0: lambda: end_in("forward 2", 2),
        1: lambda: end_in("backward 1", 1),
        2: heal,
        (2, "backward"): lambda: end(2),
        3: lambda: end(1),
    }
    assert same(train(model, 3, 4, plan), train(on_cpus(Held(net, folder), 3), 3, 4))
    assert executor.stats().deaths == 4, executor.stats()
    assert not [*Path(folder).iterdir()]
    print("nodes are lost in each phase, and training gives the same")


def elastic(cluster: Cluster, net: nn.Module) -> None:
    """Three chunks on one GPU, on two once there are two, and on one when a node drains."""
    with Executor([0, 1, 2], options=Options(elastic=True)) as executor:
        model = DataParallel(copy.deepcopy(net), executor=executor)
        states: list[str] = []

        def note() -> None:
            states.append(" ".join(sorted(info.state for info in executor.replicas())))

        def join() -> None:
            note()
            add_node(cluster, "a")
            while executor.grow(timeout=0.2) < 1:
                pass
            note()

        def drain() -> None:
            alive = {n["Labels"].get("zone"): n["NodeID"] for n in ray.nodes() if n["Alive"]}
            reason = pb.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            late = int((time.time() + 600) * 1000)
            accepted, why = gcs().drain_node(alive["a"], reason, "to be reclaimed", late)
            assert accepted, why
            time.sleep(1.1)  # it is looked for once per second

        assert same(train(model, 3, 3, {1: join, 2: drain}), train(on_cpus(net, 3), 3, 3))
        note()
        assert states == ["away away ready", "away ready ready", "away away ready"], states
        assert executor.stats().deaths == 0
    print("replicas join and leave, and training gives the same")


def chosen(cluster: Cluster, net: nn.Module) -> None:
    """By label and resource, two on one GPU; an executor for all GPUs grows."""
    shares = {"gpus_per_replica": 0.5, "cpus_per_replica": 0.25, "resources": {"c": 0.25}}
    node = add_node(cluster, "c")
    with Executor(options=Options(**shares)) as executor:
        assert nodes_of(executor) == [node.node_id] * 2
        model = DataParallel(copy.deepcopy(net), executor=executor)
        assert model(torch.ones(4, 7)).shape == (4, 2)
        other = add_node(cluster, "c")
        assert executor.grow() == 2 and executor.device_ids == [0, 1, 2, 3]
        assert sorted(nodes_of(executor)[2:]) == [other.node_id] * 2
        assert DataParallel(net, executor=executor).device_ids == [0, 1, 2, 3]
        assert model.device_ids == [0, 1]
    for ids in ([0, 1], ["cpu", "cpu"]):
        with Executor(ids, options=Options(label_selector={"zone": "in(c, d)"})) as executor:
            assert {*nodes_of(executor)} == {node.node_id, other.node_id}
    print("replicas go where Options say, two on one GPU")


def main() -> None:
    """Everything in one cluster, for starting one takes long."""
    torch.set_num_threads(1)
    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    add_node(cluster)
    add_node(cluster)
    ray.init(address=cluster.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        net = hidden(folder)
        two_nodes(net)
        with three_nodes(cluster, Options()) as executor:
            lost_in_each_phase(cluster, net, executor)
        elastic(cluster, net)
        chosen(cluster, net)
    raydp_parallel.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
