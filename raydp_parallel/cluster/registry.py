"""Reports for Ray's metrics, and for `raydp-parallel status`: an entry in Ray's key-value store,
and how to read it.

The entry is written over once per second, and deleted when the executor ends. The entry of a driver
that was killed stays until a reader finds the driver's job ended, and deletes it.
"""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._private.worker import global_worker
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.util.metrics import Counter, Gauge

from raydp_parallel import cluster
from raydp_parallel.errors import ClusterError
from raydp_parallel.monitoring.advice import SlowGpu
from raydp_parallel.monitoring.html_report import ReportFile
from raydp_parallel.monitoring.metrics import LABELS, MEASURES, MetricKind, News
from raydp_parallel.monitoring.reporter import Report, Reporter, Sink
from raydp_parallel.monitoring.status import DriverStatus, entry
from raydp_parallel.monitoring.summaries import Summaries
from raydp_parallel.monitoring.trace import TraceFile

try:
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
except ImportError:  # older versions of Ray start no cluster that asks for a token by itself
    maybe_enable_token_auth_if_token_available = None  # type: ignore[assignment]

_NAMESPACE = b"raydp_parallel"


def watch(executor: Any) -> Reporter | None:
    """Report on an executor as its options say, for as long as it lives."""
    options = executor.options
    if not (options.in_process or options.direct_line):
        executor.recorder.span = span
    sinks: list[Sink] = []
    if options.profile_dir is not None:
        trace = TraceFile(options.profile_dir, executor.recorder.name)
        sinks += [trace, ReportFile(trace.beside(".html"), _driver())]
        executor.recorder.traced = []
    if options.metrics and not options.in_process:
        sinks += [Metrics(_addresses()), RegistryEntry(executor.recorder.name), SlowGpu()]
    known = weakref.ref(executor)

    def show(replica: int, text: str) -> None:
        if (found := known()) is not None:
            found.show_work(replica, text)

    if options.metrics and options.direct_line and not options.in_process:
        sinks.append(Summaries(show))
    if not sinks:
        return None

    def look(history: Any, last: bool) -> Report | None:
        found = known()
        return None if found is None else found.recorder.report(found.stats(), history, last)

    return Reporter(look, sinks)


def span(phase: str) -> Any:
    """A span in `ray timeline`, on the row of this process."""
    if not global_worker.connected:
        return None
    return global_worker.core_worker.profile_event(phase.encode(), {"name": phase})  # type: ignore[attr-defined]


class Metrics:
    """Ray's metrics. Each counter gets what was added since the last report, so its value is exact.

    Args:
        addresses: The address of each node, by Ray's id of it.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._news = News(addresses)
        kinds = {MetricKind.COUNTER: Counter, MetricKind.GAUGE: Gauge}
        self._metrics = {
            m.name: kinds[m.kind](m.name, m.description, tag_keys=(*LABELS, *m.labels))
            for m in MEASURES
        }
        self._session = cluster.Session()

    def take(self, report: Report) -> None:
        """Add what is new to the metrics."""
        if not self._session.alive():
            return
        for measure, labels, value in self._news.of(report):
            # Not inc(), which refuses 0: a counter that begins at 0 shows its first step as one.
            self._metrics[measure.name]._record(value, labels)


class RegistryEntry:
    """The entry of an executor in Ray's key-value store.

    Args:
        name: The executor's.
    """

    def __init__(self, name: str) -> None:
        self._session = cluster.Session()
        self._driver = _driver()
        self._key = f"{self._driver.job}:{self._driver.pid}:{name}".encode()

    def take(self, report: Report) -> None:
        """Write the entry over, or delete it."""
        if not self._session.alive():
            return
        store = global_worker.gcs_client  # type: ignore[attr-defined]
        if report.last:
            store.internal_kv_del(self._key, False, _NAMESPACE)
            return
        found = entry(report, self._driver)
        store.internal_kv_put(self._key, json.dumps(found).encode(), True, _NAMESPACE)


def _driver() -> DriverStatus:
    job = ray.get_runtime_context().get_job_id() if ray.is_initialized() else "none"
    return DriverStatus(socket.gethostname(), os.getpid(), job)


def entries(address: str | None = None) -> list[dict[str, Any]]:
    """The entries of all executors of a cluster that have a living driver.

    Args:
        address: The cluster's, None for the one that ``RAY_ADDRESS`` names or that runs on this
            machine.

    Raises:
        ClusterError: There is no cluster.
    """
    store = _store(address)
    jobs = {job.job_id.hex(): job.is_dead for job in store.get_all_job_info().values()}
    found = []
    for key in store.internal_kv_keys(b"", _NAMESPACE):
        if jobs.get(_job(key), True):
            store.internal_kv_del(key, False, _NAMESPACE)
            continue
        value = store.internal_kv_get(key, _NAMESPACE)
        if value is not None:
            found.append(_read(key, value))
    return sorted(found, key=_order)


def _job(key: bytes) -> str:
    return key.decode(errors="replace").partition(":")[0]


def _read(key: bytes, value: bytes) -> dict[str, Any]:
    """An entry. If it cannot be read, only its job is known."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"job": _job(key)}


def _order(entry: dict[str, Any]) -> tuple[str, str]:
    stats = entry.get("stats")
    return str(entry.get("job")), str(stats.get("name")) if isinstance(stats, dict) else ""


def _store(address: str | None) -> Any:
    if address is None and maybe_enable_token_auth_if_token_available is not None:
        # A cluster that `ray.init()` started on this machine asks for the user's token; this is
        # Ray's own rule for it.
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        # Without an address Ray looks for RAY_ADDRESS and for what runs here, as `ray status` does.
        # Its stubs know no None.
        return GcsClient(address=canonicalize_bootstrap_address_or_die(address))  # type: ignore[arg-type]
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"no Ray cluster to look at: {error}. Run this on a machine of the cluster, or "
            "give --address"
        ) from error


def _addresses() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
