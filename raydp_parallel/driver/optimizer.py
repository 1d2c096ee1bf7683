"""The optimizer that a program has while replicas make its steps: an instance of the class that it
asked for, of which ``step`` and the state are in the replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from raydp_parallel.cluster.placement import DeviceId
from raydp_parallel.driver.executor import Executor
from raydp_parallel.driver.remote_grad import RemoteGrad
from raydp_parallel.driver.resident import Resident, States, Values
from raydp_parallel.state.mirror import Master

_numbers = itertools.count(1)


def make(
    executor: Executor,
    module: nn.Module,
    ids: Sequence[DeviceId],
    kind: object,
    params: Iterable[object],
    keywords: Values,
) -> torch.optim.Optimizer:
    """Make an optimizer whose steps the replicas of a model make.

    Raises:
        TypeError: The class is no optimizer, or calls the program within its step.
    """
    how = "model.optimizer(torch.optim.SGD, lr=0.1)"
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        got = getattr(kind, "__name__", f"a {type(kind).__name__}")
        raise TypeError(f"optimizer: expected a class of torch.optim, as in {how}, got {got}")
    if not hasattr(params, "__iter__"):
        raise TypeError(f"optimizer: expected parameters, got {params!r}; name settings, as {how}")
    if issubclass(kind, torch.optim.LBFGS):
        raise TypeError(
            f"optimizer: a step of {kind.__name__} runs the model many times, in your process: "
            f"use {kind.__name__}(model.parameters(), ...)"
        )
    executor.slots(ids)
    master = executor.master(module)
    if master.resident is None:
        master.resident = Resident(executor, master, ids)
    named = {"kind": kind, "__module__": kind.__module__}
    made: Any = type(kind.__name__, (InReplicas, kind), named)
    found: InReplicas = made(params, **keywords)
    found.begin(master.resident, keywords)
    return found


class InReplicas(torch.optim.Optimizer):
    """The parts of an optimizer that differ where replicas make the steps."""

    kind: type[torch.optim.Optimizer]
    known: Mapping[Tensor, tuple[int, int | None]]  # the rows that replicas got
    sent: Sequence[Values]  # each group's other values that they have
    _resident: Resident  # until it has one, torch makes it as an ordinary one

    def begin(self, resident: Resident, keywords: Values) -> None:
        """Let replicas make the steps from here on."""
        self.number, self.keywords, self.known = next(_numbers), keywords, {}
        self._step_supports_amp_scaling = False  # a scaler unscales gradients before the step
        resident.add(self)
        self._resident = resident

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the replicas make a step, and go on; its error comes with the next call."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._resident.step(self)
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of its parameters where they are, as
        `torch.nn.utils.clip_grad_norm_` does; returns their norm.
        """
        return self._resident.clip(self, float(max_norm), float(norm_type), error_if_nonfinite)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of its parameters, which stay where they are."""
        return self._resident.clip(self, None, float(norm_type), error=False)

    # Groups and state.

    def add_param_group(self, param_group: Values) -> None:
        """Add a group, which the replicas train from here on."""
        super().add_param_group(param_group)
        if hasattr(self, "_resident") and self.number in self._resident.weights.optimizers:
            self._resident.add(self)  # at once: a parameter may have left by the next step

    def rows(self, master: Master) -> dict[Tensor, tuple[int, int | None]]:
        """Return its parameters, with the numbers of their groups, and their slots."""
        groups = enumerate(self.param_groups)
        return {p: (number, master.slot(p)) for number, group in groups for p in group["params"]}

    def slots(self, master: Master) -> set[int]:
        """Return the slots of its parameters, but for those that have left the module."""
        return {n for _, n in self.rows(master).values() if n is not None}

    def described(self, master: Master) -> States:
        """Return its groups and its state, with slots in the place of parameters."""
        groups: list[Values] = []
        # What the other replicas have of a group: its changes since then go with the next step.
        for number, group in enumerate(self.param_groups):
            sent = self.sent[number] if number < len(self.sent) else {}  # one may have been added
            slots = [master.slot(p) for p in group["params"]]
            groups.append({**group, **sent, "params": [n for n in slots if n is not None]})
        state = {master.slot(p): dict(values) for p, values in self.__dict__["state"].items()}
        return groups, {n: values for n, values in state.items() if n is not None}

    def changed(self) -> list[Values]:
        """Return the changes of its groups since the last step."""
        news = []
        for group, sent in zip(self.param_groups, self.sent, strict=True):
            values = {}
            for name, value in group.items():
                if name != "params" and not (name in sent and _same(sent[name], value)):
                    values[name] = value.given() if isinstance(value, RemoteGrad) else value
            news.append(values)
        return news

    def arrive(self, groups: Sequence[Values], state: Mapping[int, Values]) -> None:
        """Take over what the replicas have."""
        rows = zip(self.param_groups, self.sent, groups, strict=False)  # one may have been added
        for group, sent, values in rows:
            for name, value in values.items():  # some count their steps there
                known = name in sent and _same(sent[name], group[name])
                if name != "params" and (known or name not in group):
                    group[name] = sent[name] = value
        own = self.__dict__["state"]
        for p, (_, slot) in self.known.items():
            if slot is not None and slot in state:  # of others, as of those that left, it stays
                own[p] = {}
                for name, value in state[slot].items():
                    if isinstance(value, Tensor) and value.shape == p.shape:
                        value = value.to(p.device)
                    own[p][name] = value

    @property
    def state(self) -> Any:
        """The state, fetched from the replicas, which get it again: it may be written to."""
        if hasattr(self, "_resident"):
            self._resident.recall()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        if hasattr(self, "_resident"):
            self._resident.recall()
        self.__dict__["state"] = value

    def load_state_dict(self, state_dict: Values) -> None:
        """Load groups and state, and give them to the replicas."""
        self._resident.recall()
        super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Copy and pickle it as the ordinary optimizer that it stands for."""
        state = {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}
        return self.kind.__new__, (self.kind,), state


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False  # it may have been written to
    return one is other or (type(one) is type(other) and bool(one == other))
