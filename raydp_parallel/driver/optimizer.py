"""The optimizer that a program has while replicas make its steps: an instance of the class that it
asked for, of which ``step`` and the state are in the replicas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydp_parallel.cluster.placement import DeviceId
from raydp_parallel.driver.executor import Executor
from raydp_parallel.driver.remote_grad import RemoteGrad
from raydp_parallel.driver.resident import Resident

_numbers = itertools.count(1)

Values = dict[str, Any]


def make(
    executor: Executor,
    module: nn.Module,
    ids: Sequence[DeviceId],
    kind: Any,
    params: Iterable[Any],
    keywords: dict[str, Any],
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
    found = _in_replicas(kind)(params, **keywords)  # type: ignore[arg-type]
    found.begin(master.resident, keywords)
    return found  # type: ignore[no-any-return]


@functools.cache
def _in_replicas(kind: Any) -> Any:
    return type(kind.__name__, (_InReplicas, kind), {"kind": kind, "__module__": kind.__module__})


class _InReplicas:
    """The parts of an optimizer that differ where replicas make the steps."""

    kind: type[torch.optim.Optimizer]
    param_groups: list[dict[str, Any]]
    _resident: Resident | None = None
    _known: Sequence[list[tuple[int, int | None]]] = ()

    def begin(self, resident: Resident, keywords: dict[str, Any]) -> None:
        """Let replicas make the steps from here on."""
        self.number, self.keywords = next(_numbers), keywords
        self._step_supports_amp_scaling = False  # a scaler unscales gradients before the step
        resident.add(self)
        self._resident = resident

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the replicas make a step, and go on; its error comes with the next call."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._resident is not None
        self._resident.step(self)
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of its parameters where they are, as
        `torch.nn.utils.clip_grad_norm_` does; returns their norm.
        """
        return self._clip(float(max_norm), norm_type, error_if_nonfinite)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of its parameters, which stay where they are."""
        return self._clip(None, norm_type, False)

    def _clip(self, most: float | None, norm_type: float, error: bool) -> Tensor:
        assert self._resident is not None
        return self._resident.clip(self, most, float(norm_type), error)

    # Groups and state.

    def parameters(self) -> Iterator[Tensor]:
        """Yield its parameters."""
        for group in self.param_groups:
            yield from group["params"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which the replicas train from here on."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._resident is not None and self.number in self._resident.optimizers:
            self._resident.add(self)  # at once: a parameter may have left by the next step

    def regrouped(self, number: Callable[[Tensor], int | None]) -> bool:
        """Tell if groups have other parameters than when the replicas got them, or parameters that
        have left the module, or come back.
        """
        return self._known != self._rows(number)

    def had(self, parameter: Tensor) -> bool:
        """Tell if a parameter was among those that the replicas got."""
        return any(id(parameter) == known for row in self._known for known, _ in row)

    def _rows(self, number: Callable[[Tensor], int | None]) -> list[list[tuple[int, int | None]]]:
        return [[(id(p), number(p)) for p in group["params"]] for group in self.param_groups]

    def given(self, number: Callable[[Tensor], int | None]) -> None:
        """Note that the replicas get all groups."""
        self._known = self._rows(number)
        self._sent: list[Values] = [{} for _ in self.param_groups]

    def described(
        self, number: Callable[[Tensor], int | None]
    ) -> tuple[list[Values], dict[int | None, Any]]:
        """Return its groups without parameters, and its state by number."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        state = {number(p): dict(values) for p, values in self.__dict__["state"].items()}
        state.pop(None, None)  # of parameters that left the module
        return groups, state

    def changed(self) -> list[Values]:
        """Return the changes of its groups since the last step."""
        news = []
        for group, sent in zip(self.param_groups, self._sent, strict=True):
            values = {}
            for name, value in group.items():
                if name != "params" and not (name in sent and _same(sent[name], value)):
                    values[name] = value.given() if isinstance(value, RemoteGrad) else value
            news.append(values)
        return news

    def stepped(self, values: Sequence[Values]) -> None:
        """Note that the replicas have such changes."""
        for sent, news in zip(self._sent, values, strict=True):
            sent.update(news)

    def arrive(
        self, groups: Sequence[Values], state: Mapping[int, Values], tensors: Mapping[Any, Tensor]
    ) -> None:
        """Take over what the replicas have."""
        rows = zip(self.param_groups, self._sent, groups, strict=False)  # one may have been added
        for group, sent, values in rows:
            for name, value in values.items():  # some count their steps there
                if name not in group or (name in sent and _same(sent[name], group[name])):
                    group[name] = sent[name] = value
        own = self.__dict__["state"]  # of parameters that are not there, or not any more, it stays
        for _, number in itertools.chain(*self._known):
            if number not in state:
                own.pop(tensors.get(number), None)
        for number, held in state.items():
            p = tensors[number]
            own[p] = {}
            for name, value in held.items():
                if isinstance(value, Tensor):
                    home = p.device if value.shape == p.shape else value.device
                    value = value.to(home)
                own[p][name] = value

    @property
    def state(self) -> Any:
        """The state, fetched from the replicas, which get it again: it may be written to."""
        if self._resident is not None:
            self._resident.lend()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        if self._resident is not None:
            self._resident.lend()
        self.__dict__["state"] = value

    def load_state_dict(self, state_dict: Any) -> None:
        """Load groups and state, and give them to the replicas."""
        assert self._resident is not None
        self._resident.lend()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle it as the ordinary optimizer that it stands for."""
        state = {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}  # type: ignore[attr-defined]
        return _plain, (self.kind,), state


def _plain(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind.__new__(kind)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False  # it may have been written to
    return one is other or (type(one) is type(other) and bool(one == other))
