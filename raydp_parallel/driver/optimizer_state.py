"""Groups and state of an optimizer whose steps replicas make, as they travel."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raydp_parallel.replica.training import plain
from raydp_parallel.state.mirror import Master
from raydp_parallel.state.run import same
from raydp_parallel.wire.codec import parcel

numbers = itertools.count(1)
"""Numbers of optimizers in the replicas."""

Values = dict[str, object]
"""Values of a group of an optimizer, or of its state of one parameter."""

States = tuple[list[Values], dict[int | str, Values]]
"""Attributes of an optimizer and, after them, its groups, with tags in the place of parameters; and
its state by tag, or by name what it keeps for no parameter.
"""

Rows = dict[Tensor, tuple[int, int | None, Values]]
"""Parameters, with the numbers of their groups, their tags, and their attributes."""


class OptimizerState(torch.optim.Optimizer):
    """An optimizer that the program has, and what replicas know of it."""

    kind: type[torch.optim.Optimizer]
    number: int
    keywords: Values
    known: Rows  # that replicas got
    told: Sequence[Values]  # its own attributes that they have, and each group's other values

    def rows(self, master: Master) -> Rows:
        """Return its parameters, and what replicas are told of them."""
        rows = [(n, p) for n, group in enumerate(self.param_groups) for p in group["params"]]
        return {p: (number, master.tag(p), plain(vars(p))) for number, p in rows}

    def attributes(self, master: Master) -> dict[int, Values]:
        """Return those of its parameters by tag, but for parameters that have left the module."""
        return {n: own for _, n, own in self.rows(master).values() if n is not None}

    def described(self, master: Master) -> States:
        """Return its groups and its state, with tags in the place of parameters."""
        groups: list[Values] = [{**plain(vars(self)), **self.told[0]}]
        # What the other replicas have: while a step is on its way, the program may change, add and
        # take out.
        for number, told in enumerate(self.told[1:]):
            tags = [master.tag(p) for p, (row, *_) in self.known.items() if row == number]
            group = self.param_groups[number] if number < len(self.param_groups) else {}
            groups.append({**group, **told, "params": [n for n in tags if n is not None]})
        own = vars(self)["state"].items()
        state = {p if isinstance(p, str) else master.tag(p): values for p, values in own}
        return groups, {n: values for n, values in state.items() if n is not None}

    def news(self) -> list[Values]:
        """Return the changes of its groups since the last step."""
        found = []
        for group, told in zip([plain(vars(self)), *self.param_groups], self.told, strict=True):
            values = {}
            for name, value in group.items():
                if name != "params" and not (name in told and _same(told[name], value)):
                    # The program may write to it, also while the step is on its way.
                    values[name] = copy.deepcopy(value)
            found.append(values)
        return found

    def arrive(self, groups: Sequence[Values], state: Mapping[int | str, Values]) -> None:
        """Take over what the replicas have."""
        own, rows = self.__dict__["state"], self.param_groups
        # One may have been added.
        for group, told, values in zip([vars(self), *rows], self.told, groups, strict=False):
            for name, value in values.items():  # some count their steps there
                known = name in told and _same(told[name], group.get(name))
                newer = name != "params" and not _same(told.get(name), value)
                if newer and (known or name not in group):
                    group[name], told[name] = value, copy.deepcopy(value)
        own.update((n, values) for n, values in state.items() if isinstance(n, str))
        on_device = {p for g in rows if g.get("fused") or g.get("capturable") for p in g["params"]}
        for p, (_, tag, _) in self.known.items():
            if tag is not None and tag in state:  # of others, as of those that left, it stays
                own[p] = dict(state[tag])
                for name, value in state[tag].items():
                    if isinstance(value, Tensor) and (name != "step" or p in on_device):
                        own[p][name] = value.to(p.device)  # as torch's own loading does


def _same(one: object, other: object) -> bool:
    if one is other:  # nothing that can be written to: copies are compared
        return True
    # Those of replicas come on the CPU.
    (one, row), (other, others) = parcel(one, "group"), parcel(other, "group")
    pairs = zip(row, others, strict=False)
    return one == other and all([a.dtype == b.dtype and same(a.cpu(), b.cpu()) for a, b in pairs])
