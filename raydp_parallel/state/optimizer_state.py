"""What an optimizer keeps besides the parameters, by their numbers, so that another process can
take it over.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def pack_state(optimizer: Any) -> tuple[tuple[dict[Any, Any] | None, ...], dict[Any, Any]]:
    """What an optimizer keeps of each parameter, None if nothing; and what it keeps besides."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = {*map(id, parameters)}
    state = optimizer.state
    common = {key: value for key, value in state.items() if id(key) not in known}
    found = tuple([dict(state[p]) if p in state else None for p in parameters])
    return found, common


def look_state(optimizer: Any) -> list[Any]:
    """What shows edits of an optimizer's state: identities and versions of its tensors, and numbers
    as they are.
    """
    found: list[Any] = []
    for key, values in optimizer.state.items():
        found.append(id(key))
        for name, value in values.items() if isinstance(values, dict) else (("", values),):
            if isinstance(value, Tensor):
                found.append((name, id(value), value._version))
            else:
                is_number = isinstance(value, (bool, int, float))
                found.append((name, value if is_number else id(value)))
    return found


def options_of(groups: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The options of groups, without their parameters."""
    return tuple([{k: v for k, v in group.items() if k != "params"} for group in groups])


def changed_options(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that are others than they were."""
    return {k: v for k, v in now.items() if k not in then or not _alike(v, then[k])}


def take_stepped(
    group: dict[str, Any], told: dict[str, Any], then: dict[str, Any], made: dict[str, Any]
) -> None:
    """Take what steps have changed of a group's options, such as counters, into the group. What the
    program has changed since then stays.

    Args:
        group: The group.
        told: Its options as replicas were told last; what steps have changed is entered.
        then: Its options as replicas had been told when they made these steps.
        made: Its options after these steps.
    """
    since = changed_options(told, then)
    edited = changed_options({key: group[key] for key in told if key in group}, told)
    for key, value in changed_options(made, then).items():
        if key in since:
            continue
        if isinstance(value, Tensor) and isinstance(then.get(key), Tensor):
            value = value.to(then[key].device)
        told[key] = copy.deepcopy(value)
        if key not in edited:
            group[key] = value


def _alike(one: Any, other: Any) -> bool:
    """Whether two values of an option are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def put_state(
    optimizer: Any, state: Sequence[dict[Any, Any] | None], common: dict[Any, Any]
) -> None:
    """Give an optimizer what `pack_state` found of another one, on the devices of its own
    parameters.

    Counts of steps lie on the CPU, as in torch, unless their group is ``capturable`` or ``fused``.
    """
    kept = iter(state)
    optimizer.state.clear()
    optimizer.state.update(common)
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            values = next(kept)
            if values is None:
                continue
            if not on_device:
                values = {key: _counted(key, value) for key, value in values.items()}
            optimizer.state[parameter] = values


def _counted(key: Any, value: Any) -> Any:
    is_count = key == "step" and isinstance(value, Tensor)
    return value.to(torch.device("cpu")) if is_count else value
