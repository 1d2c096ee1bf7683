"""Upstream's verbs, each usable alone: `replicate`, `scatter`, `scatter_kwargs`, `parallel_apply`,
`gather`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from raydp_parallel import batch, cluster
from raydp_parallel.batch import gather, scatter, scatter_kwargs
from raydp_parallel.calls import forward
from raydp_parallel.calls.executor import Executor, shared
from raydp_parallel.cluster.backend import DeviceId, device_id
from raydp_parallel.cluster.replica_slots import ReplicaSlot
from raydp_parallel.devices import ambient_state
from raydp_parallel.options import Options, UnusedGrads
from raydp_parallel.replica.replica import WithAttributes
from raydp_parallel.state.shared_objects import SharedObjects
from raydp_parallel.state.structure import refuse_unreplicable
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport.messages import Called

__all__ = ["RemoteReplica", "gather", "parallel_apply", "replicate", "scatter", "scatter_kwargs"]

_NONE: Mapping[str, Any] = MappingProxyType({})


class RemoteReplica:
    """A module's replica on a device of the cluster. Called like the module; gradients reach the
    module itself.

    It is the module as it is when called: what changed since `replicate` is seen. Methods and
    submodules can be called, too. An attribute that is set on it is set on the replica's module
    while a call runs, and stays unknown to the module itself.

    Attributes:
        module: The master copy.
        device_id: Where the replica runs.
    """

    module: nn.Module
    device_id: DeviceId
    _slot: ReplicaSlot
    _tracker: ModuleTracker
    _executor: Executor
    _detach: bool
    _called: Called
    _set: Mapping[str, Any]

    def __init__(
        self,
        module: nn.Module,
        device: DeviceId,
        slot: ReplicaSlot,
        tracker: ModuleTracker,
        executor: Executor,
        detach: bool,
        called: Called = None,
        attributes: Mapping[str, Any] = _NONE,
    ) -> None:
        self.__dict__.update(
            module=module,
            device_id=device,
            _slot=slot,
            _tracker=tracker,
            _executor=executor,
            _detach=detach,
            _called=called,
            _set=attributes,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if self._called is not None:
            raise AttributeError(
                f"{name!r} cannot be set on {self._called!r} of a replica, which is in another "
                "process: set attributes on the replica itself, or on the module before the call"
            )
        self.__dict__["_set"] = {**self._set, name: value}

    def __getattr__(self, name: str) -> Any:
        # What was set, a value of the module's, or a method or submodule to be called there.
        known = self.__dict__
        if name in known.get("_set", ()):
            return known["_set"][name]
        if name.startswith("__") or known.get("_called", "") is not None:
            raise AttributeError(f"RemoteReplica has no attribute {name!r}")
        value = getattr(self.module, name)
        if not callable(value):
            return value
        if hasattr(nn.Module, name) and name != "forward":
            raise AttributeError(
                f"RemoteReplica has no attribute {name!r}: the replica's module is in another "
                "process. Change the module before the call, and read it after the call"
            )
        return self._calling(name)

    @ambient_state.uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replica. An exception of the module is raised as it is, as a plain call would."""
        return self._begin(args, kwargs).outputs()[0]

    def _begin(self, args: Any, kwargs: dict[str, Any]) -> forward.ForwardCall:
        unused = self._executor.options.unused_grads
        chunks = [self._chunk(args, kwargs, None, 0)]
        return forward.ForwardCall(self._executor, chunks, unused).send()

    def _chunk(
        self, args: Any, kwargs: dict[str, Any], where: str | None, dim: int
    ) -> forward.ForwardChunk:
        positional = tuple(args) if isinstance(args, (list, tuple)) else (args,)
        rows = batch.rows(positional, kwargs, dim)
        return forward.ForwardChunk(
            self._slot,
            self._tracker,
            args=positional,
            kwargs=kwargs,
            where=where,
            rows=rows,
            detach=self._detach,
            called=WithAttributes(self._set, self._called) if self._set else self._called,
        )

    def _calling(self, called: Called) -> RemoteReplica:
        return RemoteReplica(
            self.module,
            self.device_id,
            self._slot,
            tracker=self._tracker,
            executor=self._executor,
            detach=self._detach,
            called=called,
            attributes=self._set,
        )

    def __reduce__(self) -> Any:
        which = self.module, self.device_id, self._detach, self._executor
        return _replica_again, (*which, self._called, dict(self._set))

    def __repr__(self) -> str:
        return f"RemoteReplica({type(self.module).__name__} on {self._slot})"


def _replica_again(
    module: nn.Module,
    device: DeviceId,
    detach: bool,
    executor: Executor,
    called: Called,
    attributes: Mapping[str, Any],
) -> RemoteReplica:
    replica = replicate(module, [device], detach, executor=executor)[0]
    for name, value in attributes.items():
        setattr(replica, name, value)
    return replica._calling(called)


@ambient_state.uncompiled
def replicate(
    network: nn.Module,
    devices: Iterable[Any],
    detach: bool = False,
    *,
    executor: Executor | None = None,
) -> list[RemoteReplica]:
    """Replicate a module on devices of the cluster.

    Args:
        network: The module.
        devices: Logical GPUs of the cluster, or ``"cpu"`` entries.
        detach: Whether the replicas take no gradients for the module's parameters.
        executor: The executor that runs the replicas; None is the process's.

    Returns:
        One callable replica per device.
    """
    refuse_unreplicable(network)
    ids = [device_id(entry) for entry in devices]
    if not ids:
        return []
    owner = executor or shared(Options())
    slots = owner.slots(ids)
    tracker = owner.tracker(network, keep=executor is None)
    return [
        RemoteReplica(network, device, slot, tracker=tracker, executor=owner, detach=detach)
        for device, slot in zip(ids, slots, strict=True)
    ]


@ambient_state.uncompiled
def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Any] | None = None,
) -> list[Any]:
    """Apply each module to its input, all at once.

    Args:
        modules: Remote replicas; or plain modules, which run on ``devices``.
        inputs: For each module its arguments, a tuple or list, or a single argument.
        kwargs_tup: For each module its keyword arguments.
        devices: For each module its device. Replicas have theirs.

    Returns:
        The outputs.

    Raises:
        AssertionError: The numbers of modules, inputs, kwargs or devices differ.
    """
    return apply(modules, inputs, kwargs_tup, devices)


def apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None,
    devices: Sequence[Any] | None,
    *,
    dim: int = 0,
    unused: UnusedGrads = "zeros",
) -> list[Any]:
    """`parallel_apply`, with the settings of a wrapper's options."""
    return begin(modules, inputs, kwargs_tup, devices, dim=dim, unused=unused).outputs()


def begin(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None,
    devices: Sequence[Any] | None,
    *,
    dim: int = 0,
    unused: UnusedGrads = "zeros",
) -> forward.ForwardCall:
    """What `apply` waits for."""
    kwargs = _checked(modules, inputs, kwargs_tup, devices)
    replicas = _replicas(modules, devices)
    chunks = [
        replica._chunk(args, kwarg, f"in replica {i} on device {replica.device_id}", dim)
        for i, (replica, args, kwarg) in enumerate(zip(replicas, inputs, kwargs, strict=True))
    ]
    return forward.ForwardCall(replicas[0]._executor, chunks, unused).send()


def calling(replicas: Sequence[Any], called: Called) -> Sequence[Any]:
    """The same replicas, of which a call runs a method of the module, or a function with it."""
    if called is None:
        return replicas
    for replica in replicas:
        if not isinstance(replica, RemoteReplica):
            raise TypeError(
                "call and run need replicas that replicate() of raydp_parallel made, got "
                f"{type(replica).__name__}"
            )
    return [replica._calling(called) for replica in replicas]


def begin_one(
    replica: RemoteReplica,
    args: Any,
    kwargs: dict[str, Any],
    dim: int = 0,
    *,
    given: SharedObjects | None = None,
) -> forward.ForwardCall:
    """The only device's call. Upstream runs the module itself there: raw errors, no zeros,
    rebinding stays, and so does what forward stores in objects of the caller.

    Args:
        replica: The device's replica.
        args: Its positional arguments, after scattering.
        kwargs: Its keyword arguments.
        dim: The dimension of rows.
        given: The objects among the arguments that the caller has.
    """
    chunk = replica._chunk(tuple(args), kwargs, None, dim)
    chunk = chunk._replace(alone=True, shared=given)
    return forward.ForwardCall(replica._executor, [chunk], "none").send()


def _checked(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Any] | None,
    devices: Sequence[Any] | None,
) -> Sequence[dict[str, Any]]:
    for name, others in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        if others is not None and len(others) != len(modules):
            raise AssertionError(
                f"The number of modules {len(modules)} is not equal to the number of {name} "
                f"{len(others)}"
            )
    if not modules:
        raise IndexError("parallel_apply: list of modules is empty")
    return kwargs_tup if kwargs_tup is not None else [{} for _ in modules]


def _replicas(modules: Sequence[Any], devices: Sequence[Any] | None) -> list[RemoteReplica]:
    if {*map(type, modules)} == {RemoteReplica}:
        owners = {id(module._executor) for module in modules}
        if len(owners) > 1:
            raise ValueError(
                "parallel_apply: these replicas belong to different executors; apply each "
                "executor's alone"
            )
        return list(modules)
    strange = next((m for m in modules if not isinstance(m, (nn.Module, RemoteReplica))), None)
    if strange is not None:
        raise TypeError(
            f"parallel_apply: {type(strange).__name__} is neither a replica nor a module"
        )
    owner = next((m._executor for m in modules if isinstance(m, RemoteReplica)), None)
    if owner is None:
        owner = shared(Options())
    if devices is None:
        gpus = cluster.all_gpus(owner.options)
        ids = [gpus[i % len(gpus)] if gpus else "cpu" for i in range(len(modules))]
    else:
        ids = [device_id(entry) for entry in devices]
    found = []
    for module, device, slot in zip(modules, ids, owner.slots(ids), strict=True):
        replica = module
        if not isinstance(module, RemoteReplica):
            tracker = owner.tracker(module, keep=True)
            replica = RemoteReplica(
                module, device, slot, tracker=tracker, executor=owner, detach=False
            )
        found.append(replica)
    return found
