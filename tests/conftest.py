"""One Ray for the whole suite: a node with two GPUs that it only counts, so that cluster logic runs
without any.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from files_together import scheduler
from record import Deadline, record_of

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray Tune does not take back its handler of Ctrl-C, which later tests press.
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--link shared`` or ``collective`` runs the suite with another link, ``--nodes 2`` on
    several nodes.
    """
    parser.addoption(
        "--link", default="auto", help="the link of tests that do not choose one: Options(link=...)"
    )
    help = (
        "run on so many nodes, with the driver on a head without CPUs and GPUs; 0 is one "
        "node for all"
    )
    parser.addoption("--nodes", type=int, default=0, help=help)
    parser.addoption(
        "--minutes", type=float, default=10.0, help="how long the soak of test_soak.py runs"
    )
    parser.addoption("--long", action="store_true", help="run the tests that are marked long, too")
    help = "note in this file how each test ends, and leave out those that it says have passed"
    parser.addoption("--record", type=Path, help=help)
    help = "skip tests that would begin after this moment, in seconds since 1970"
    parser.addoption("--until", type=float, help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Make the chosen link the default; and one thread in each replica, as in the tests' own
    computations. Tests may end as many replicas as they like.
    """
    from raydp_parallel import Options

    global _nodes
    _nodes = config.getoption("--nodes")
    if config.getoption("--record"):
        config.pluginmanager.register(record_of(config, config.getoption("--record")))
    if config.getoption("--until"):
        config.pluginmanager.register(Deadline(config.getoption("--until")))
    Options.__init__.__kwdefaults__.update(
        link=config.getoption("--link"), threads=1, max_restarts_per_hour=10_000
    )
    # A shell starts what runs in the background with SIGINT ignored, and tests of Ctrl-C would wait
    # for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "copies: about the copies of small tensors, which --link shared does without"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests to ``--long``, and what older versions of torch do otherwise to newer ones;
    and with ``--link shared`` nothing is copied.
    """
    if not config.getoption("--long"):
        left = [item for item in items if item.get_closest_marker("long") is not None]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.get_closest_marker("long") is None]
    if not hasattr(torch.accelerator, "device_index"):
        left = [item for item in items if item.get_closest_marker("upstream") is not None]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.get_closest_marker("upstream") is None]
    if config.getoption("--link") == "shared":
        for item in items:
            if item.get_closest_marker("copies") is not None:
                item.add_marker(pytest.mark.skip(reason="with --link shared nothing is copied"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files that need the same executors go to one process."""
    return scheduler(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def imports_apart() -> None:
    """Leave what was imported up to this file out of each later look for cycles, which would take
    0.3 s: some tests ask for many.
    """
    gc.collect()
    gc.freeze()


_nodes = 0
_cluster: Any = None


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A running Ray node with 2 fake GPUs."""
    start_ray()
    yield
    stop_ray()


class Executors:
    """Executors that tests share, because a replica takes seconds to start: for each `Options` the
    one that wrappers without an executor use, of which a test gets as many CPU replicas as it asks
    for.

    No test closes one, or ends replicas of one that is not named ``"killable"``; which replicas run
    the chunks of a dead one depends on how many there are, so those are made for each number. What
    an executor counts, it counts from where a test begins.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._parts: dict[Any, Any] = {}

    def __call__(self, count: int = 2, **options: Any) -> Any:
        """The executor with so many CPU replicas, all of which are there."""
        import raydp_parallel

        start_ray()
        chosen = raydp_parallel.Options(**options)
        if chosen.name is None and not chosen.in_process:
            return self._part(count, chosen)
        key = count, chosen
        found = self._made.pop(key, None)
        if found is None or found.closed or not found.replica_set.backend.alive():
            found = raydp_parallel.Executor(["cpu"] * count, options=chosen)
        self._made[key] = found  # the last one that was used is the last in the dict
        found.grow(120)  # an earlier test may have ended a replica
        assert len(found.replicas()) == count, "an earlier test has added replicas"
        return found

    def _part(self, count: int, options: Any) -> Any:
        from part_of_executor import PartOfExecutor

        from raydp_parallel.calls.executor import shared

        whole = shared(options)
        if options != type(options)():  # wrappers use that one, in nearly each file
            self._made.pop(options, None)
            self._made[options] = whole
        part = self._parts.get((count, options))
        if part is None or not part.is_of(whole):
            part = self._parts[count, options] = PartOfExecutor(whole, count)
        whole.slots(part.device_ids)
        whole.grow(120)
        return part

    def close(self, replicas: int = 0) -> None:
        """End all but those with so many replicas that were used last."""
        while sum(map(_processes, self._made.values())) > replicas:
            self._made.pop(next(iter(self._made))).close()


def _processes(executor: Any) -> int:
    return 0 if executor.options.in_process else len(executor.replica_set.slots)


_shared = Executors()


@pytest.fixture(scope="session")
def executors(cluster: None) -> Iterator[Executors]:
    """Executors for tests that are not about how one starts or ends."""
    yield _shared
    _shared.close()


@pytest.fixture(scope="module", autouse=True)
def few_replicas() -> Iterator[None]:
    """Between two files no more replicas stay than a machine has memory for, beside those that
    wrappers without an executor use: each takes up to half a gigabyte.
    """
    yield
    _shared.close(8)


@pytest.fixture
def two(executors: Executors) -> Any:
    """An executor with two replicas."""
    return executors()


@pytest.fixture
def killable(executors: Executors) -> Any:
    """An executor with two replicas that a test ends: others than those of `two`, so that the tests
    after it need not wait until the next ones have started.
    """
    return executors(name="killable")


def start_ray(**options: object) -> None:
    """Start the suite's Ray, unless it runs."""
    import ray

    if not ray.is_initialized() and _nodes:
        _start_nodes()
        ray.init(address=_cluster.address, log_to_driver=False)
    elif not ray.is_initialized():
        fixed = {"address": "local", "include_dashboard": False, "log_to_driver": False}
        # Ray starts so many processes at a time as it has CPUs.
        settings = {**fixed, "num_cpus": 4, "num_gpus": 2, **options}
        ray.init(**settings)  # type: ignore[arg-type]


def _start_nodes() -> None:
    """Nodes as in `start_ray`, behind a head that has nothing but the driver."""
    from ray.cluster_utils import Cluster

    global _cluster
    _cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for number in range(_nodes):
        _cluster.add_node(num_cpus=1, num_gpus=1 if number < 2 else 0)


def stop_ray() -> None:
    """End the suite's replicas and its Ray."""
    import ray

    import raydp_parallel

    raydp_parallel.shutdown()
    ray.shutdown()
    if _cluster is not None:
        _cluster.shutdown()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts with the same random numbers, and computes with one thread, as the replicas
    do.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
