"""Run by test_dashboard.py in its own process: a Ray with its dashboard, a Prometheus that scrapes
it, a browser.

What is found is printed, one line each. Arguments: a folder for the screenshots.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # a browser without a token may look

import browser
import ray
import torch
from ray.util import state
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor, Options, command
from raydp_parallel.cluster import registry
from raydp_parallel.monitoring import grafana, status

ROWS, STEPS = 64, 150

WORK = re.compile(r"work \d+ samples/s, forward \d+ %, backward \d+ %, idle \d+ %")
"""What a replica's task says of its work."""

OPEN_HISTORY = """
const heads = [...document.querySelectorAll('*')].filter(e => e.textContent.trim() == 'Tasks History');
heads.pop().click();
"""

SHOW_HISTORY = """
const heads = [...document.querySelectorAll('*')].filter(e => e.innerText && e.innerText.trim() == 'Tasks History');
heads.pop().scrollIntoView();
window.scrollBy(0, -120);
"""


class Net(nn.Module):
    """A perceptron that is slow in the replica with rows that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 4))

    def forward(self, x: Tensor, delay: Tensor) -> Tensor:
        time.sleep(float(delay[0]))
        return self.layers(x)


class Training:
    """A loop with a second replica that can be slowed."""

    def __init__(self, executor: Executor | None = None) -> None:
        self.net = Net()
        options = Options(name="train")
        if executor is None:
            self.model = DataParallel(self.net, ["cpu", "cpu"], options=options)
        else:
            self.model = DataParallel(self.net, executor=executor)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.x = torch.randn(ROWS, 128)

    def steps(self, count: int, delay: float = 0.0) -> None:
        """Some steps."""
        delays = torch.zeros(ROWS)
        delays[ROWS // 2 :] = delay
        for _ in range(count):
            loss = self.model(self.x, delays).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


class Prometheus:
    """A Prometheus that scrapes this Ray each second.

    Args:
        port: Where it answers.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def ask(self, query: str) -> list[dict[str, Any]]:
        """A query's result, with the dashboard's choices all made."""
        for name, value in (("$executor", ".*"), ("$model", ".*"), ("$__rate_interval", "10s")):
            query = query.replace(name, value)
        with urllib.request.urlopen(
            self._url + urllib.parse.urlencode({"query": query}), timeout=10
        ) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found

    def value(self, query: str) -> float | None:
        """The only number of a query's result."""
        found = self.ask(query)
        return float(found[0]["value"][1]) if found else None


@contextlib.contextmanager
def prometheus() -> Iterator[Prometheus]:
    """A new one, gone at the end."""
    port = browser.free_port()
    node = ray.nodes()[0]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        target = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        scrape = {"job_name": "ray", "static_configs": [{"targets": [target]}]}
        config.write_text(
            json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]})
        )
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(10)


def within(seconds: float, what: Callable[[], Any]) -> tuple[Any, float]:
    """What comes of asking until there is an answer, and how long that took."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        with contextlib.suppress(OSError, LookupError):
            if (found := what()) is not None:
                return found, time.monotonic() - start
        time.sleep(0.1)
    return None, seconds


def numbers(asked: Prometheus, training: Training) -> None:
    """Every panel returns data; the samples are exact; the phases add up."""
    rows = ROWS * STEPS
    samples = "sum(ray_raydp_samples_total)"
    found, _ = within(15, lambda: rows if asked.value(samples) == rows else None)
    print(f"samples: {asked.value(samples):.0f} of {rows}", "exact" if found else "WRONG")
    seconds = asked.value('sum(ray_raydp_phase_seconds_total{phase!="idle"})') or 0.0
    known = sum(r.phases.total - r.phases.idle for r in training.model.executor.stats().replicas)
    print(f"busy seconds: {seconds / known:.3f} of the statistics'")
    # a rate needs two scrapes
    within(15, lambda: asked.ask("sum(rate(ray_raydp_samples_total[10s]))") or None)
    for title, query in panels():
        print(
            f"panel {title}: {len(asked.ask(query))} "
            f"series{' (GPU)' if title.startswith('GPU') else ''}"
        )


def panels() -> list[tuple[str, str]]:
    """The titles of the dashboard's panels, with their queries."""
    found = [(panel["title"], panel.get("targets", ())) for panel in grafana.dashboard()["panels"]]
    return [(title, target["expr"]) for title, targets in found for target in targets]


def ended(asked: Prometheus, total: float) -> None:
    """What the last report brought, when the executor had ended: all phases, and they make up the
    whole time.
    """
    query = 'sum(ray_raydp_phase_seconds_total{replica="0"})'
    found, _ = within(10, lambda: value if (value := asked.value(query) or 0.0) >= total else None)
    print(f"phases in Prometheus at the end: {found and found / total:.3f} of the wall time")


def straggler(asked: Prometheus | None, training: Training) -> None:
    """What says how soon which replica is slow."""
    address = ray.get_runtime_context().gcs_address
    start, said = time.monotonic(), {}

    def note(who: str, named: bool) -> None:
        if named and who not in said:
            said[who] = time.monotonic() - start

    query = dict(panels())["Straggler"] + " > 1.25"
    while time.monotonic() - start < 12 and len(said) < (4 if asked else 3):
        training.steps(5, delay=0.03)
        stats = training.model.executor.stats()
        note("stats", stats.replicas[1].recent_ms > 2 * stats.replicas[0].recent_ms)
        note(
            "advice",
            any(advice.topic == "straggler" and advice.replica == 1 for advice in stats.advice),
        )
        note("status", "replica 1 on cpu" in status.render(registry.entries(address)))
        if asked is not None:
            note("query", [found["metric"]["replica"] for found in asked.ask(query)] == ["1"])
    print("straggler:", ", ".join(f"{who} after {seconds:.1f} s" for who, seconds in said.items()))


def look(folder: Path, url: str) -> None:
    """The dashboard's pages of actors and of one of them, and our own report."""
    address = ray.get_runtime_context().gcs_address
    with contextlib.ExitStack() as stack:
        tab = stack.enter_context(browser.browser())
        tab.open(f"{url}/#/actors")
        tab.wait_for("raydp:train:0@cpu", "raydp:train:1@cpu", "Replica(1@cpu")
        tab.picture(folder / "actors.png")
        print("the Actors page shows both replicas by name and device")
        actor = next(a for a in state.list_actors(address=address) if a.name == "raydp:train:1@cpu")
        tab.open(f"{url}/#/actors/{actor.actor_id}")
        tab.wait_for("Tasks History")
        tab.ask("POST", "/execute/sync", script=OPEN_HISTORY, args=[])
        text = tab.wait_for("work ", " samples/s, forward ", " %, backward ", " %, idle ")
        tab.ask("POST", "/execute/sync", script=SHOW_HISTORY, args=[])
        time.sleep(0.5)  # the page scrolls smoothly
        tab.picture(folder / "actor.png")
        print(
            "the actor's page shows its work;",
            "housekeeping" if "open_line" in text else "no housekeeping",
        )
        report = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "report.html"
        command.main(["report", "--html", str(report), "--address", address])
        for mode in ("light", "dark"):
            tab.ask(
                "POST",
                "/goog/cdp/execute",
                cmd="Emulation.setEmulatedMedia",
                params={"features": [{"name": "prefers-color-scheme", "value": mode}]},
            )
            tab.open(report.as_uri())
            tab.wait_for("Where each replica's time went")
            tab.picture(folder / f"report-{mode}.png")
        print("the report is drawn")


def said_by_all(training: Training) -> bool | None:
    """Go on with the work, until the dashboard says of each replica what it does; None if it does
    not yet.
    """
    training.steps(5)
    tasks = state.list_tasks(address=ray.get_runtime_context().gcs_address, limit=1000)
    working = {task.actor_id for task in tasks if WORK.fullmatch(task.name)}
    return len(working) == 2 or None


def history() -> None:
    """What Ray's own tools list."""
    address = ray.get_runtime_context().gcs_address
    tasks = state.list_tasks(address=address, limit=1000)
    working = {task.actor_id for task in tasks if WORK.fullmatch(task.name)}
    others = [
        task.name for task in tasks if not WORK.fullmatch(task.name) and "__init__" not in task.name
    ]
    print(f"tasks: {len(working)} replicas say what they do, others {others}")
    # The span of a task comes with a later report than the task itself.
    spans, _ = within(
        10, lambda: any(WORK.fullmatch(event["name"]) for event in ray.timeline()) or None
    )
    print(f"work in the timeline: {spans is True}")


def phases() -> None:
    """What Ray's tools list where each call is a task."""
    address = ray.get_runtime_context().gcs_address
    with Executor(
        ["cpu", "cpu"], options=Options(name="tasks", direct_line=False, metrics=False)
    ) as executor:
        training = Training(executor)
        training.steps(3)
        wanted = {
            f"{phase} chunk {chunk}/2" for phase in ("forward", "backward") for chunk in (1, 2)
        }

        def listed() -> set[str] | None:
            names = {task.name for task in state.list_tasks(address=address, limit=1000)}
            return wanted if wanted <= names else None

        found, _ = within(10, listed)
        print(f"phases as tasks: {found == wanted}")
        names = {"adopt", "copy in", "forward", "backward", "copy out", "wait", "reduce"}
        spans, _ = within(
            10, lambda: names if names <= {event["cat"] for event in ray.timeline()} else None
        )
        print(f"phases in the timeline: {spans == names}")


def main(folder: Path) -> None:
    """Everything with one Ray, for starting one takes long."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    context = ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=True,
        dashboard_port=browser.free_port(),
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(prometheus()) if shutil.which("prometheus") else None
        training = Training()
        training.model.executor.slots(training.model.device_ids)
        start, before = time.perf_counter(), training.model.executor.stats()
        training.steps(STEPS)
        wall, after = time.perf_counter() - start, training.model.executor.stats()
        for a, b in zip(before.replicas, after.replicas, strict=True):
            print(
                f"phases add up to {(b.phases.total - a.phases.total) / wall:.3f} of the wall time"
            )
        if asked is None:
            print("skipped: no prometheus")
        else:
            numbers(asked, training)
        straggler(asked, training)
        within(10, lambda: said_by_all(training))
        history()
        if browser.missing():
            print(f"skipped: no {browser.missing()}")
        else:
            look(folder, f"http://{context.dashboard_url}")
        phases()
        stats = training.model.executor.stats()
        raydp_parallel.shutdown()
        if asked is not None:
            ended(asked, stats.replicas[0].phases.total)
    print("entries left:", len(registry.entries(ray.get_runtime_context().gcs_address)))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
