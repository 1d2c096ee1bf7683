"""`RayBackend`: starts replicas on a Ray cluster under names that its dashboard shows, carries
calls to them, sends the source files that they lack, and notices their end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raydp_parallel import devices
from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.backend import (
    Death,
    DevicePlace,
    Ending,
    OnAnswer,
    TaskLabel,
)
from raydp_parallel.cluster.client import (
    Lost,
    Pending,
    ReplicaClient,
    await_any,
    await_each,
    await_ends,
)
from raydp_parallel.cluster.joining import connect
from raydp_parallel.cluster.placement import Hold, Holds, booked, for_cpus, homes, no_room
from raydp_parallel.cluster.ray_api import Node, living, nodes
from raydp_parallel.devices.ambient_state import environment, environment_at_load
from raydp_parallel.devices.buffers import Arena
from raydp_parallel.devices.ranges import Attachment, ReplicaHello
from raydp_parallel.errors import PlacementError
from raydp_parallel.options import Options
from raydp_parallel.progress import Waiting
from raydp_parallel.replica.actor import ReplicaActor
from raydp_parallel.state import module_sources
from raydp_parallel.transport import cuda_ipc, handshake
from raydp_parallel.transport.links import Link, link_for, shared, shared_link
from raydp_parallel.transport.messages import Package

log = logging.getLogger("raydp_parallel")


def program() -> str:
    """What to call a program's executor: its file, without the characters that names cannot
    have.
    """
    stem = Path(sys.argv[0]).stem if sys.argv else ""
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "python"


class ActorNames:
    """Starts replicas under names that say what they are, such as ``raydp:train:2@cuda:1``.

    Args:
        name: The executor's.
        ranks: The numbers of the places that are known already.

    Attributes:
        executor: The executor's name.
    """

    def __init__(self, name: str, ranks: Mapping[DevicePlace, int]) -> None:
        self.executor = name
        self._secret = handshake.new_secret()
        self._ranks = {**ranks}
        self._used: set[str] = set()

    def start(
        self, place: DevicePlace, link: str, paths: Sequence[str], options: Mapping[str, Any]
    ) -> Any:
        """Start a replica. Its name ends in a number if there is or was another of that name."""
        rank = self._ranks.setdefault(place, len(self._ranks))
        device = "cpu" if place.kind == "cpu" else f"cuda:{place.number}"
        early = environment_at_load() if place.kind == "gpu" else None
        if early:  # a process of its own: those that Ray keeps ready have loaded without them
            options = {**options, "runtime_env": {"env_vars": early}}
        for number in itertools.count(1):
            name = f"raydp:{self.executor}:{rank}@{device}" + (f"~{number}" if number > 1 else "")
            if name in self._used:
                continue
            self._used.add(name)
            try:
                return ReplicaActor.options(name=name, **options).remote(  # type: ignore[attr-defined]
                    place.kind, link, rank, environment(), self._secret, paths=paths
                )
            # another program of this namespace has it, or got it at the same moment
            except ValueError as error:
                if not re.search("already (taken|exists)", str(error)):
                    raise
        raise AssertionError("numbers do not end")


class CodeDelivery:
    """The modules that the replicas of one backend were sent.

    Attributes:
        version: The number of modules that were added; a replica with this number has all of them.
    """

    def __init__(self) -> None:
        self.version = 0
        self._packages: dict[str, tuple[str, Any]] = {}
        self._lock = threading.Lock()

    def add(self, package: Package, clients: Sequence[ReplicaClient]) -> bool:
        """Send a module to all replicas, to each before its next call; False if all of these have
        it already.
        """
        with self._lock:
            if self._packages.get(package.name, ("",))[0] != package.digest:
                self._packages[package.name] = package.digest, ray_api.put(package)
                self.version += 1
                log.info(
                    "replicas cannot import the driver's %s: its files are sent to them",
                    package.name,
                )
                return True
        return any(client.modules.get(package.name) != package.digest for client in clients)

    def catch_up(self, client: ReplicaClient, timeout: float | None) -> None:
        """Send a replica the modules that it lacks."""
        if client.code_version == self.version:
            return
        with self._lock:
            version, packages = self.version, dict(self._packages)
        missing = {
            name: entry for name, entry in packages.items() if client.modules.get(name) != entry[0]
        }
        ray_api.get(
            [client.actor.learn.remote(ref) for _, ref in missing.values()], timeout=timeout
        )
        client.modules.update((name, digest) for name, (digest, _) in missing.items())
        client.code_version = version


_BETWEEN_LOOKS = 1.0
"""Seconds between two checks for nodes that are about to end; each is a call to Ray."""

_AT_ONCE = 0.001
"""Seconds to wait for an answer that is late."""

_GRACE = 0.5
"""Seconds in which Ray may end a process; it takes 50 ms."""

_MUTE = 60.0
"""Seconds in which no replica of a node is called directly, after one could not be reached in
time.
"""

_CAUSE_TIMEOUT = 5.0
"""Seconds that Ray may take to say why a process ended."""


class CoreShares:
    """How many threads of torch a chunk gets: its share of the cores that there are.

    Args:
        fixed: The number that the options say; None if they do not.
        computing: The nodes that CPU replicas may be on.
    """

    def __init__(self, fixed: int | None, computing: Sequence[Node]) -> None:
        self._fixed = fixed
        self._nodes, self._machines = len(computing), len({node.address for node in computing})
        self._told = int(min(node.total.get("CPU", 1) for node in computing))
        self._found: int | None = None

    def count(self, hellos: Iterable[ReplicaHello]) -> None:
        """Keep the number of cores of the replicas that start first: how a call computes must not
        change when others join later.
        """
        found = [hello.cores for hello in hellos if hello.device == "cpu" and hello.cores]
        if self._found is None and found:
            self._found = min(found)

    def threads(self, chunks: int) -> int | None:
        """The threads for each of so many chunks, see `Backend.threads`."""
        if self._fixed:
            return self._fixed
        shares = [self._told // -(-chunks // self._nodes)]
        if self._found is not None:
            shares.append(self._found // -(-chunks // self._machines))
        return max(1, min(shares))


class NodeWatch:
    """Looks for nodes that are about to end, at most once per `_BETWEEN_LOOKS`."""

    def __init__(self) -> None:
        self._leaving: frozenset[str] = frozenset()
        self._next = 0.0

    def leaving(self) -> frozenset[str]:
        """These nodes."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _BETWEEN_LOOKS
            self._leaving = ray_api.draining()
        return self._leaving


class DriverMemory:
    """This process's memory, as replicas get it: the link of their cluster, and which of them read
    the memory where it lies.

    Args:
        options: The link that is asked for, and its paths.
        machines: The nodes of the cluster.

    Attributes:
        pin: Registers memory with a GPU that copies from it; None copies otherwise.
        link: The link.
    """

    def __init__(self, options: Options, machines: Sequence[Node]) -> None:
        self._options = options
        self.pin = devices.pinner(None) if "registered" in options.gpu_paths else None
        self._arena: Arena | None = None
        self._told = False
        self.link = self._chosen(machines)
        # Checked once: isinstance() of a protocol is slow.
        self._device_link = self.link if isinstance(self.link, cuda_ipc.DeviceLink) else None

    def _chosen(self, machines: Sequence[Node]) -> Link:
        options = self._options
        name, count = options.link, len(machines)
        possible = shared.exists()
        if name == "shared" and not (possible and count == 1):
            raise PlacementError(
                "Options(link='shared'): memory is shared on one machine with Linux, where nothing "
                f"forbids it; the cluster has {count} node(s)"
            )
        on_gpu, here = homes(machines, options), ray_api.here()
        # If all GPUs are on other nodes, no replica would use the memory.
        if name in ("auto", "shared") and possible and (count == 1 or not on_gpu or here in on_gpu):
            self._arena = Arena(pin=self.pin)
            # Ray's object store lies in the same file system as shared storages, and takes the
            # pages that it may use one by one.
            promised = sum(
                int(node.free.get("object_store_memory", 0)) for node in machines if node.id == here
            )
            link = shared_link(
                self._arena, exposes=True, always=name == "shared", promised=promised
            )
            if "ipc" in options.gpu_paths:
                link = cuda_ipc.reaching(link, "peer" in options.gpu_paths)
            if count > 1:
                # Replicas on other nodes get copies, which are compared with the driver's memory.
                link.withdraw()
            return link
        return link_for(name, ray_api.put, ray_api.get)

    def link_to(self, client: ReplicaClient) -> Link:
        """The link of messages to one replica."""
        if self._device_link is None:
            return self.link
        arena = client.memory.arena
        return self._device_link.to(arena.device) if arena else self._device_link.near

    def meet(self, client: ReplicaClient, hello: ReplicaHello, near: bool) -> None:
        """Share memory with a replica that has started, if it is on this node."""
        if self._arena is None:
            return
        if near:
            client.memory.share(
                self._arena, self._options.link == "shared", self._options.placement_timeout
            )
        if not client.shares or hello.device != "cpu":
            self.link.withdraw()
        if not client.shares:
            self._go_without(hello, near)
        elif self._device_link is not None:
            meet_on_device(client, hello, self._device_link)

    def _go_without(self, hello: ReplicaHello, near: bool) -> None:
        """Warn, or raise, because a replica and this process cannot read each other's memory. That
        is expected on another node.
        """
        what = (
            f"the replica with pid {hello.pid} on node {hello.node[:8]} cannot share "
            "memory with this process"
        )
        if self._options.link == "shared":
            raise PlacementError(
                f"Options(link='shared'): {what}; leave `link` out to copy bytes instead"
            )
        if near and not self._told:
            self._told = True
            log.warning("%s: bytes are copied", what)


def meet_on_device(client: ReplicaClient, hello: ReplicaHello, link: cuda_ipc.DeviceLink) -> None:
    """Share the memory of a replica's GPU with it, if this process uses that GPU or, with ``peer``,
    one from which bytes can be copied there. Other replicas get copies through host memory: to use
    a GPU costs half a gigabyte of its memory.

    A replica opens the memory of its own GPU alone: it may be unable to open that of another,
    or only by way of its own.
    """
    device = cuda_ipc.gpu_in_use(hello.gpu_uuid, link.peers)
    if device is None:
        return
    arena = link.arenas.get(device) or cuda_ipc.DeviceArena(device)
    if link.peers and not cuda_ipc.try_peers(arena):
        return
    why = client.memory.share_device(arena)
    if why:
        cuda_ipc.refused(why)
    else:
        link.arenas[device] = arena


class RayBackend:
    """Replicas as Ray actors.

    Args:
        names: Starts actors under their names.
        options: Deadlines, and what to book.
    """

    def __init__(self, names: ActorNames, options: Options) -> None:
        connect()
        self._names = names
        self._options = options
        self.alive = ray_api.Session().alive
        machines = nodes()
        self._memory = DriverMemory(options, machines)
        self.link = self._memory.link
        self._cores = CoreShares(options.threads, for_cpus(machines, options) or machines)
        self.leaving = NodeWatch().leaving
        self._holds = Holds(names.executor, options)
        self._mute: dict[str, float] = {}
        self._beside: weakref.WeakSet[ReplicaClient] = weakref.WeakSet()
        self._code = CodeDelivery()
        self._warned: set[str] = set()

    def threads(self, chunks: int) -> int | None:
        return self._cores.threads(chunks)

    def link_to(self, client: ReplicaClient) -> Link:
        return self._memory.link_to(client)

    def start(
        self, places: Sequence[DevicePlace], cancelled: Callable[[], bool] | None = None
    ) -> dict[DevicePlace, tuple[Any, ReplicaHello]]:
        clients: dict[DevicePlace, ReplicaClient] = {}
        deadline = time.monotonic() + self._options.placement_timeout
        holds: Mapping[DevicePlace, Hold] = {}
        try:
            holds = self._holds.claim(places, deadline, cancelled)
            absent = [place for place in places if place not in holds]
            if absent:
                _check_wanted(cancelled)
            if absent and not (self._options.elastic and holds):
                raise no_room(places, absent, self._options)
            held = {place: holds[place] for place in places if place in holds}
            for place, client in self._create(held):
                clients[place] = client
            known = {place: client.actor.versions.remote() for place, client in clients.items()}
            refs = {place: client.actor.hello.remote() for place, client in clients.items()}
            late = self._await(list(refs.values()), holds, deadline, cancelled)
            if late:
                _check_wanted(cancelled)
                late_on = {place: holds[place].node for place, ref in refs.items() if ref in late}
                raise _not_started(late_on, self._options.placement_timeout)
            self._compare({place: ray_api.get(ref) for place, ref in known.items()})
            hellos = {place: ray_api.get(ref) for place, ref in refs.items()}
            for place, hello in hellos.items():
                self._meet(clients[place], hello)
            self._cores.count(hellos.values())
            for client in clients.values():
                self._code.catch_up(client, self._options.placement_timeout)
            return {place: (clients[place], hello) for place, hello in hellos.items()}
        except ray_api.RayError as error:
            self._undo(holds, clients)
            text = str(error)
            hint = ""
            if "'raydp_parallel'" in text:
                hint = ": install raydp_parallel on every node of the cluster"
            raise PlacementError(f"a replica did not start{hint}: {text}") from error
        except BaseException:
            self._undo(holds, clients)
            raise

    def _compare(self, found: Mapping[DevicePlace, Sequence[tuple[str, str]]]) -> None:
        """Refuse replicas with another version of this package, and warn of another torch or
        NumPy.
        """
        for place, theirs in found.items():
            for (name, mine), (_, other) in zip(module_sources.versions(), theirs, strict=False):
                if mine == other:
                    continue
                what = (
                    f"the replica for device {place.device_id} has {name} {other}, the "
                    f"driver has {name} {mine}"
                )
                if name == module_sources.versions()[0][0]:
                    raise PlacementError(
                        f"{what}: install the same {name} on every node of the cluster"
                    )
                if what not in self._warned:
                    self._warned.add(what)
                    log.warning("%s: results may differ by rounding", what)

    def _undo(
        self, holds: Mapping[DevicePlace, Hold], clients: Mapping[DevicePlace, ReplicaClient]
    ) -> None:
        self.stop(list(clients.values()))
        self.release(holds)

    def _await(
        self,
        refs: list[Any],
        holds: Mapping[DevicePlace, Hold],
        deadline: float,
        cancelled: Callable[[], bool] | None,
    ) -> list[Any]:
        """Wait for all tasks, in short turns between which Ctrl-C is noticed; returns those that
        are late.
        """
        late = refs
        with Waiting("replicas to start, and to import torch", len(refs)) as tell:
            while late:
                left = deadline - time.monotonic()
                if left <= 0 or (cancelled is not None and cancelled()):
                    break
                turn = min(left, ray_api.TURN)
                if cancelled is None:
                    late = ray_api.late(refs, turn)
                    tell(len(refs) - len(late))
                else:
                    # A start in the background does not wait inside of Ray: if the program leaves
                    # the cluster while a thread is in there, Ray ends its process.
                    time.sleep(turn / 4)
                    if cancelled():
                        break
                    late = ray_api.late(refs)
                if late and not living().issuperset(hold.node for hold in holds.values()):
                    break
        return late

    def _meet(self, client: ReplicaClient, hello: ReplicaHello) -> None:
        """Choose how a replica is called, and share memory with it if it is on this node.

        With ``link="object_store"`` all calls go through Ray, which carries their bytes too.
        """
        near = hello.node == ray_api.here()
        direct = self._options.direct_line and self._options.link != "object_store"
        wanted = direct and time.monotonic() >= self._mute.get(hello.node, -math.inf)
        if wanted and not client.call_directly(near, timeout=self._options.placement_timeout):
            self._mute[hello.node] = time.monotonic() + _MUTE
            log.warning(
                "replicas that start on node %s in the next %g s are called through Ray too: each "
                "attempt takes seconds",
                hello.node[:8],
                _MUTE,
            )
        if near:
            client.watch(hello.pid)
            if hello.device == "cpu":
                self._beside.add(client)
        self._memory.meet(client, hello, near)

    def _create(
        self, holds: Mapping[DevicePlace, Hold]
    ) -> Iterator[tuple[DevicePlace, ReplicaClient]]:
        for place, hold in holds.items():
            needs = booked(place.kind, self._options)
            amounts = {
                "num_cpus": needs.pop("CPU", 0),
                "num_gpus": needs.pop("GPU", 0),
                "resources": needs,
            }
            strategy = {"scheduling_strategy": hold.strategy()}
            paths = self._options.gpu_paths
            actor = self._names.start(place, self._options.link, paths, {**amounts, **strategy})
            yield place, ReplicaClient(actor, self._options.call_timeout, self._memory.pin)

    def rest(self) -> None:
        if self._beside:
            devices.rest()

    def submit(
        self,
        client: ReplicaClient,
        method: str,
        header: bytes,
        beside: Sequence[Attachment],
        task: TaskLabel | None = None,
    ) -> Any:
        if client.code_version != self._code.version:
            try:
                self._code.catch_up(client, self._options.call_timeout)
            except ray_api.RayError as error:
                return Lost(client, error)
        return client.submit(method, header, beside, self._options.call_timeout, task)

    def collect(
        self, pending: Sequence[Pending | Lost], on_answer: OnAnswer | None = None
    ) -> Iterable[Any]:
        start, timeout = time.monotonic(), self._options.call_timeout
        # A replica that runs several calls, one after the other, has time for each.
        deadlines = [
            math.inf if timeout is None else start + timeout * call.turn for call in pending
        ]
        # All chunks end before the failure of one is raised.
        together = True in [call.through_ray or call.held_back for call in pending]
        if on_answer is None and not together:
            ends = zip(pending, deadlines, strict=True)
            return (self._result(call, max(_AT_ONCE, end - time.monotonic())) for call, end in ends)
        results: list[Any] = [None] * len(pending)

        def take(number: int, there: bool) -> None:
            results[number] = self._result(pending[number], math.inf if there else _AT_ONCE)
            if on_answer is not None:
                on_answer(number, results[number])

        await_each(pending, deadlines, take)
        return results

    def come(self, pending: Sequence[Pending | Lost], wait: bool) -> Collection[int]:
        if not self.alive():
            return range(len(pending))
        timeout = self._options.call_timeout if wait else 0.0
        return await_any(pending, math.inf if timeout is None else timeout)

    def _result(self, call: Pending | Lost, seconds: float) -> Any:
        try:
            return call.result(None if seconds == math.inf else seconds)
        except TimeoutError:
            return Death(
                f"no answer within call_timeout={self._options.call_timeout} s", Ending.SILENT
            )
        except ray_api.RayError as error:
            return Death(ray_api.in_short(error))

    def leave(self, client: ReplicaClient, groups: Sequence[str]) -> None:
        if self.alive():
            with contextlib.suppress(ray_api.RayError):
                client.actor.leave.remote(tuple(groups))

    def show(self, client: ReplicaClient, text: str) -> None:
        if client.line is not None and self.alive():
            client.actor.work.options(name=text).remote(text)

    def note(self, client: ReplicaClient, text: str) -> None:
        client.actor.note.remote(text)

    def cause(self, client: ReplicaClient, death: Death) -> str:
        # Ray would start another cluster, were it asked after the end of this one.
        if death.ending is Ending.SILENT or not self.alive():
            return death.cause
        return client.cause_of_end(_CAUSE_TIMEOUT, self.alive) or death.cause

    def stop(self, clients: Sequence[Any]) -> None:
        for client in clients:
            self._beside.discard(client)
            client.close()
            if self.alive():
                ray_api.kill(client.actor)
        # By Ray first: it reports a process that another one ended to the user as an accident.
        if self.alive():
            await_ends(clients, _GRACE)
        for client in clients:
            client.end()

    def send_code(self, package: Package, clients: Sequence[Any]) -> bool:
        return self._code.add(package, clients)

    def release(self, places: Collection[DevicePlace] | None = None) -> None:
        if self.alive():
            self._holds.release(places)


def _not_started(late: Mapping[DevicePlace, str], timeout: float) -> PlacementError:
    """The error for replicas that got a place, each with its node, but did not start there."""
    which = f"the replicas for device_ids {[place.device_id for place in late]} were placed, but"
    lost = {*late.values()} - living()
    if lost:
        return PlacementError(
            f"{which} nodes ended meanwhile: {', '.join(node[:8] for node in sorted(lost))}"
        )
    return PlacementError(
        f"{which} did not start within placement_timeout={timeout:g} s; the logs of their "
        "processes, in Ray's session folder, may say why"
    )


def _check_wanted(cancelled: Callable[[], bool] | None) -> None:
    """End a start that is not needed any more. The cluster may be gone, and a question to Ray would
    start another one.
    """
    if cancelled is not None and cancelled():
        raise PlacementError("this start is not needed any more")
