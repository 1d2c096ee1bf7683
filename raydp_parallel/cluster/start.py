"""Starts replicas as Ray actors, under names such as ``raydp:train:2@cuda:1``, and meets them."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping

import torch

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.clients import Client, NearClient, end_all
from raydp_parallel.cluster.placement import Hold, Holds, Over, Place, booked, homes, no_room
from raydp_parallel.cluster.ray_api import Actor
from raydp_parallel.devices import threads
from raydp_parallel.devices.ambient import environment
from raydp_parallel.devices.cuda import Hello, own_gpu
from raydp_parallel.errors import ClusterError, ExecutorClosed, GraphLost, PlacementError, log
from raydp_parallel.monitoring.stats import count
from raydp_parallel.options import ExecutorOptions
from raydp_parallel.replica.actor import ReplicaActor, peer, versions


class Starter:
    """Starts the replicas of one executor, in the cluster that is connected now."""

    def __init__(self, name: str, options: ExecutorOptions) -> None:
        ray_api.connect()
        self.alive = ray_api.session()  # tells if that is still connected
        self.ended = threading.Event()  # set when nobody needs further replicas
        self._name, self._options = name, options
        self.holds = Holds(name, options)
        self._ways = options.ways
        computing = homes("cpu", options) or ray_api.nodes()
        self._nodes = 1 if options.label_selector else len(computing)  # labels may leave one
        self._told = int(min(node.total.get("CPU", 1) for node in computing))
        self._cores = 0

    def threads(self, chunks: int) -> int | None:
        """Return torch's threads for each of so many chunks on CPUs: a share of the cores.

        A function of the call alone: a chunk's bits must not depend on the replica that runs it.
        """
        if not self.alive():  # forward makes sure of one that is
            raise GraphLost("the Ray cluster was left, and the replicas with it: run forward again")
        if self._options.threads:
            return self._options.threads
        share = min(self._told, self._cores or self._told) // -(-chunks // self._nodes)
        if torch.get_num_threads() < threads.AT_START:  # the program asked for fewer
            share = min(share, torch.get_num_threads())
        return max(1, share)

    def start(self, wanted: Mapping[Place, int], background: bool = False) -> dict[Place, Client]:
        """Start a replica in each place, by its number in the executor, or raise `PlacementError`;
        with ``elastic`` in some. Nobody may need one any more that starts in the background.

        A place keeps its part of the cluster, also for its next replica, until it is released.
        """
        begun = time.monotonic()
        said = begun + 3

        def over() -> bool:
            nonlocal said
            now = time.monotonic()
            if not self.alive():  # a question to Ray would start another cluster
                raise ClusterError("your Ray was left while replicas ran; the next use starts anew")
            if self.ended.is_set():
                raise ExecutorClosed("the executor, or the program, ended while replicas started")
            if not background and now >= said:
                said = now + 10
                replicas = count(len(wanted), "replica")
                log.warning("waiting for %s to start (%.0f s so far)", replicas, now - begun)
            return now >= begun + self._options.placement_timeout

        actors: dict[Place, Actor] = {}
        clients: dict[Place, Client] = {}
        try:
            over()  # which raises if nobody needs them any more
            holds = self.holds.claim([*wanted], over)
            absent = [place for place in wanted if place not in holds]
            if absent and not (self._options.elastic and holds):
                raise no_room([*wanted], absent, self._options)
            for place, index in wanted.items():  # numbers are in the order of device_ids
                if place in holds:
                    actors[place] = self._create(place, index, holds[place])
            hellos = self._greet(actors, {hold.node for hold in holds.values()}, over)
            for place, hello in hellos.items():
                client = clients[place] = self._meet(actors[place], hello, over)
                device = own_gpu(hello.gpu_uuid) if "ipc" in self._ways else None
                try:
                    if device is not None and isinstance(client, NearClient):
                        client.try_ipc(device)
                except Exception as error:  # the replica may hang, or its GPU not answer any more
                    log.warning("CUDA IPC is left out, because its trial failed: %s", error)
                    self._ways.discard("ipc")
                    clients.pop(place).end()
                    clients |= self.start({place: wanted[place]}, background)
            return clients
        except BaseException as error:
            if self.alive():
                end_all(clients.values())
                for actor in actors.values():
                    ray_api.kill(actor)
                self.holds.release(wanted)
            if isinstance(error, ray_api.RayError):
                hint = "" if "'raydp_parallel'" not in str(error) else ": install it on every node"
                raise PlacementError(f"a replica did not start{hint}: {error}") from None
            raise

    def _create(self, place: Place, index: int, hold: Hold, number: int = 1) -> Actor:
        """Start an actor. Its name ends in a number if there is another of that name."""
        needs = booked(place.kind, self._options)
        early = {**(threads.MALLOC if place.kind == "cpu" else {}), **environment()}
        options: dict[str, object] = {"runtime_env": {"env_vars": early}, "resources": needs}
        options["num_cpus"] = needs.pop("CPU", 0)
        options["num_gpus"] = needs.pop("GPU", 0)
        options["scheduling_strategy"] = ray_api.strategy(*hold)
        end = f"~{number}" if number > 1 else ""
        name = f"raydp:{self._name}:{index}@{place.device}{end}"
        try:
            return ReplicaActor.options(name=name, **options).remote(place.kind, index)  # type: ignore[attr-defined]
        # another program of this namespace has it, or got it at the same moment
        except ValueError as error:
            if not re.search("already (taken|exists)", str(error)):
                raise
            return self._create(place, index, hold, number + 1)

    def _greet(self, actors: dict[Place, Actor], nodes: set[str], over: Over) -> dict[Place, Hello]:
        """Wait until actors run, as long as their nodes do; returns what they say of themselves."""
        hellos = {place: actor.hello.remote() for place, actor in actors.items()}
        late, ended = [*hellos.values()], set[str]()
        while late and not ended and not over():
            late = ray_api.late(late)
            ended = nodes - ray_api.living() if late else ended
            # Outside of Ray, which ends a program that leaves while one of its threads is inside.
            time.sleep(ray_api.PAUSE)
        if late:
            ids = [place.device for place, ref in hellos.items() if ref in late]
            why = f"see their logs; where all cores are busy, {ray_api.NICENESS}=0 may help"
            if ended:
                why = f"nodes ended: {', '.join(n[:8] for n in ended)}"
            raise PlacementError(
                f"the replicas for device_ids {ids} were placed, but did not start within "
                f"placement_timeout={self._options.placement_timeout:g} s; {why}"
            )
        found = {}
        for place, ref in hellos.items():
            found[place], theirs = ray_api.get(ref)
            self._compare(place, theirs)
            # How a call computes must not change when others join later.
            self._cores = self._cores or found[place].cores
        return found

    def _compare(self, place: Place, theirs: Mapping[str, str]) -> None:
        """Refuse a replica with another version of this package; warn of another torch or NumPy."""
        mine = versions()
        for name, version in theirs.items() - mine.items():
            text = f"the replica for device {place.device} has {name} {version}, not {mine[name]}"
            if name == "raydp_parallel":
                raise PlacementError(f"{text}: install the same on every node of the cluster")
            ray_api.warn_once(f"{text}: results may differ by rounding")

    def _meet(self, actor: Actor, hello: Hello, over: Over) -> Client:
        """Choose how a replica is called: over a socket if it is on this machine, else by Ray."""
        if hello.node == ray_api.here():
            with socket.socket(socket.AF_UNIX) as listener:
                # An abstract name leaves no file behind. The kernel says who connects.
                name = f"raydp-{secrets.token_hex(16)}"
                listener.bind(f"\0{name}")
                listener.listen()
                listener.settimeout(ray_api.TURN)
                serving = actor.serve.remote(name)
                while ray_api.late([serving]):
                    if over():
                        late = f"placement_timeout={self._options.placement_timeout:g} s"
                        raise PlacementError(f"a replica did not connect within {late}")
                    try:
                        sock, _ = listener.accept()
                    except TimeoutError:
                        continue
                    if peer(sock) == (hello.pid, os.getuid()):
                        return NearClient(actor, hello, serving, sock)
                    sock.close()
            why = ray_api.get(serving) or "its process is not the one that connected"
            log.warning("a replica of this node is called through Ray, which is slower: %s", why)
        return Client(actor, hello, actor.live.remote())
