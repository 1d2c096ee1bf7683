"""Replicas for all tests: forked ones, see tests/support/forked.py, and for tests that are marked
``ray`` those of one Ray, which has a node with two GPUs that it only counts.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import on_gpus  # before torch

# isort: split
import forked
import poison
import pytest
import torch

import raydp_parallel
from raydp_parallel import Options
from raydp_parallel.cluster import replica_set

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray Tune does not take back its handler of Ctrl-C, which later tests press.
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")

_nodes = 0
_cluster: Any = None
_on_ray: bool | None = None  # None: neither has begun


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--long`` adds the tests that take their time, ``--ray`` runs all on Ray, ``--nodes 2`` on
    several nodes of it, so that all replicas are far. ``--way sent`` maps no weights, ``--way
    deadly`` ends the replica that is called, every 50th time, ``--way poisoned`` overwrites memory
    that nobody may read any more. ``--device`` has them on stand-in GPUs: see
    tests/device/on_gpus.py.
    """
    parser.addoption("--long", action="store_true", help="run the tests that are marked long, too")
    parser.addoption("--smoke", action="store_true", help="run each tenth test that needs no Ray")
    parser.addoption("--device", choices=on_gpus.PLACES, default="cpu", help="where they run")
    parser.addoption("--ray", action="store_true", help="run all tests on Ray")
    parser.addoption("--nodes", type=int, default=0, help="as many, beside the driver's head")
    parser.addoption("--way", choices=[*_WAYS], default="", help="of a call")


@pytest.hookimpl(tryfirst=True)  # replicas are forked from a process that pytest has not changed
def pytest_configure(config: pytest.Config) -> None:
    """Let replicas compute with one thread, as tests do."""
    global _nodes
    _nodes = config.getoption("--nodes")
    on_gpus.use()
    _WAYS[config.getoption("--way")]()
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and not config.getoption("--ray") and not _nodes:
        forked.start()
    on_gpus.place()
    Options.__init__.__kwdefaults__.update(threads=1)
    # A shell starts programs in the background with SIGINT ignored; tests of Ctrl-C would hang.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def sent() -> None:
    """Let no replica map the weights."""
    from raydp_parallel.state.mirror import Master

    update = Master.update_from

    def unmapped(self: Any, revision: int, way: object, weights: Any) -> Any:
        return update(self, revision, "sent", weights)

    Master.update_from = unmapped  # type: ignore[method-assign]


def deadly() -> None:
    """Let every 50th call find its replica dead, if another one lives."""
    from raydp_parallel.driver.dispatcher import Dispatcher

    send, calls = Dispatcher.send, itertools.count(1)

    def deadly_send(self: Any, slot: Any, call: Any, *how: Any) -> Any:
        due = call.phase in ("forward", "backward") and next(calls) % 50 == 0
        if due and slot.ready and len(self.replica_set.ready_slots()) > 1:
            os.kill(slot.info().pid, signal.SIGKILL)
        return send(self, slot, call, *how)

    Dispatcher.send = deadly_send  # type: ignore[method-assign]


_WAYS: dict[str, Any] = {"": int, "sent": sent, "deadly": deadly, "poisoned": poison.use}


def needs_ray(item: pytest.Item) -> bool:
    """Tell if a test is to run on Ray."""
    asked = item.config.getoption("--ray") or _nodes
    return bool(asked or item.get_closest_marker("ray"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests to ``--long``, and let those that need Ray run first."""
    if not config.getoption("--long"):
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if on_gpus.asked() != "cpu":
        left = [item for item in items if needs_ray(item) or on_gpus.leave_out(item.nodeid)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    items.sort(key=needs_ray, reverse=True)
    if config.getoption("--smoke"):
        chosen = [item for item in items if not needs_ray(item)][::10]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all files with tests that need Ray, so that there is one Ray."""
    from xdist.scheduler import LoadFileScheduling

    class OneRay(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if file.endswith(("test_points.py", "test_places.py")):  # each test takes long
                return nodeid
            return "ray" if "mark.ray" in Path(config.rootpath, file).read_text() else file

    return OneRay(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let replicas be those that the test needs."""
    choose(needs_ray(item))


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """End at once: replicas and Ray end with the processes of the tests."""
    excinfo.traceback = excinfo.traceback[-1:]  # to print all of it takes seconds
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def pytest_sessionfinish() -> None:
    """Leave nothing behind."""
    leave()


def choose(on_ray: bool) -> None:
    """Let replicas be Ray's from now on, or forked ones. The others end."""
    global _on_ray
    if on_ray != _on_ray:
        leave()
        forked.use(not on_ray)
    if on_ray:
        start_ray()
    _on_ray = on_ray


def leave() -> None:
    """End all replicas, and Ray."""
    global _on_ray, _cluster
    _shared.close()
    raydp_parallel.shutdown()
    for known in [*replica_set._sets]:
        known.close()
    if _on_ray:
        import ray

        ray.shutdown()
        if _cluster is not None:
            _cluster.shutdown()
    _on_ray = _cluster = None


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Begin each test with the same random numbers, one thread, and gradients."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with on_gpus.watched():
        yield
    enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert enabled, "gradients are off after this test"


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Let collections of garbage look only at what a file makes: else each takes 0.2 s."""
    gc.collect()
    gc.freeze()


class Executors:
    """Executors that tests share: of each `Options`, with as many CPU replicas as a test asks for.

    Tests end replicas only of those that are named ``"killable"``.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def __call__(self, count: int = 2, **options: Any) -> Any:
        """Give an executor with so many CPU replicas, all of which are ready."""
        chosen = Options(**options)
        found = self._made.pop((count, chosen), None)
        if found is None or found.closed:
            found = raydp_parallel.Executor(["cpu"] * count, options=chosen)
        self._made[count, chosen] = found  # the last one that was used is the last in the dict
        found.grow(120)  # an earlier test may have ended a replica
        assert len(found.replicas()) == count, "an earlier test has added replicas"
        return found

    def close(self, replicas: int = 0) -> None:
        """End all but those with so many replicas that were used last."""
        while sum(len(made.replicas()) for made in self._made.values()) > replicas:
            self._made.pop(next(iter(self._made))).close()


_shared = Executors()


@pytest.fixture(scope="session")
def executors() -> Executors:
    """Executors for tests that are not about how one starts or ends."""
    return _shared


@pytest.fixture(scope="module", autouse=True)
def few_replicas() -> Iterator[None]:
    """Keep no more replicas between two files than a machine has memory for."""
    yield
    _shared.close(8)


@pytest.fixture
def two(executors: Executors) -> Any:
    """An executor with two replicas."""
    return executors()


@pytest.fixture
def killable(executors: Executors) -> Any:
    """An executor with two replicas that a test may end."""
    return executors(name="killable")


def start_ray() -> None:
    """Start the suite's Ray, unless it runs."""
    import ray

    global _cluster
    if ray.is_initialized():
        return
    if not _nodes:
        # Ray starts as many processes at a time as it has CPUs.
        how: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "num_gpus": 2}
        ray.init(address="local", num_cpus=4, **how)
        return
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    _cluster = Cluster(initialize_head=True, head_node_args=head)
    for number in range(_nodes):
        _cluster.add_node(num_cpus=1, num_gpus=1 if number < 2 else 0)
    ray.init(address=_cluster.address, log_to_driver=False)
