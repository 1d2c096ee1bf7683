"""The replica's side of training where the weights are: gradients that stay, their sums, and the
optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raydp_parallel.batch.containers import mapped
from raydp_parallel.devices import ambient, threads
from raydp_parallel.devices.layout import Row
from raydp_parallel.devices.memory import copy_row
from raydp_parallel.replica import engine
from raydp_parallel.replica.module import ReplicaModule
from raydp_parallel.wire.codec import Parcel, parcel
from raydp_parallel.wire.group import Exchange, summable
from raydp_parallel.wire.messages import ADDED, KEPT, ResumeRequest, SnapshotRequest, StepRequest

Tags = Sequence[int | None]
"""Those of a graph's leaves; None for inputs."""


_PLAIN = bool, int, float, str, type(None)


def plain(values: Mapping[str, object]) -> dict[str, object]:
    """Choose attributes that are numbers or texts, or rows of them."""
    rows = [(k, v, v if isinstance(v, (list, tuple)) else [v]) for k, v in values.items()]
    return {name: value for name, value, row in rows if all(type(one) in _PLAIN for one in row)}


class ReplicaTraining:
    """Gradients and optimizers of one model."""

    def __init__(self, module: ReplicaModule) -> None:
        self._module = module
        self._kept: dict[int, dict[int, Tensor]] = {}  # by chunk and tag
        self._runs: dict[torch.dtype, Tensor] = {}  # in which sums lie
        # Those of the norm, which the step may use again, and all that they follow from.
        self._last: dict[int, Tensor] = {}
        self._of: object = None
        # Each with its own parameters, and their tags.
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, dict[Tensor, int]]] = {}

    # Gradients.

    def drop_old(self, chunk: int, tags: Tags, codes: bytes) -> None:
        """Drop gradients of a chunk that begin anew, before there is memory for the new ones."""
        kept = self._kept.setdefault(chunk, {})
        for tag, code in zip(tags, codes, strict=True):
            if code == KEPT and tag is not None:
                kept.pop(tag, None)

    def keep(self, chunk: int, tags: Tags, codes: bytes, grads: list[Tensor | None]) -> bytes:
        """Keep gradients of a chunk, and take these out of the row; returns which they are.

        Args:
            chunk: The number of the chunk.
            tags: Whose gradients they are; None for inputs.
            codes: The fate of each.
            grads: The gradients, each with memory of its own.
        """
        kept = self._kept.setdefault(chunk, {})
        stays = [False] * len(grads)
        for at, (tag, code, grad) in enumerate(zip(tags, codes, grads, strict=True)):
            plain = type(grad) is Tensor and grad.layout is torch.strided
            if code < KEPT or tag is None or grad is None or not plain:
                continue
            if code == ADDED and tag in kept:
                kept[tag].add_(grad)
            else:
                kept[tag] = grad.detach()
            grads[at], stays[at] = None, True
        return bytes(stays)

    def gradients(self, tags: Sequence[int], chunk: int) -> list[Tensor]:
        """Return gradients that a chunk has kept."""
        return [self._kept[chunk][tag] for tag in tags]

    def _sums(self, request: StepRequest, exchange: Exchange | None) -> dict[int, Tensor]:
        """Sum what chunks have kept, in the order of chunks."""
        found: dict[int, Tensor] = {}
        members = 1 if exchange is None else exchange.size
        # Of a group each member has the chunk of its number, or none.
        chunks = [c for c in request.chunks if exchange is None or c == exchange.rank]
        rows: dict[torch.dtype, dict[int, Tensor]] = {}
        for tag in request.summed:
            like = self._module.tracked[tag].tensor
            rows.setdefault(like.dtype, {})[tag] = like
        # In the same order everywhere, as members exchange one after the other.
        for dtype, own in rows.items():
            run, sums = summable([*own.values()], members, self._runs.pop(dtype, None))
            self._runs[dtype] = run
            for chunk in chunks[:1]:
                copy_row(sums, self.gradients([*own], chunk))
            for chunk in chunks[1:]:
                for total, grad in zip(sums, self.gradients([*own], chunk), strict=True):
                    total.add_(grad)
            if exchange is not None:
                exchange.add([run], request.chunks)
            found.update(zip(own, sums, strict=True))
        return found

    # Steps.

    def step(self, request: StepRequest, exchange: Exchange | None) -> Row:
        """Make a step; or return the norm, and keep the sums for the step."""
        optimizer, tags = self._optimizers[request.optimizer]
        of = exchange, request.sums, request.summed, request.chunks
        if self._of != of:
            self._of, self._last = None, {}  # they lie where the new ones will
            self._last = self._sums(request, exchange)
        self._of = None if request.norm is None else of  # which a step changes
        if request.scale is not None:
            for dtype in {grad.dtype for grad in self._last.values()}:
                self._runs[dtype].mul_(request.scale)  # all of them at once
        grads = dict(self._last)
        for tag, given in request.from_driver.items():
            like = self._module.tracked[tag].tensor
            grads[tag] = torch.zeros_like(like) if given is None else given.clone()
        if request.norm is not None:
            found = [grads[tag] for tag in tags.values() if tag in grads]
            return Row([torch.nn.utils.get_total_norm(found, request.norm)])
        rows = vars(optimizer), *optimizer.param_groups
        for group, values in zip(rows, request.values, strict=True):
            for name, value in values.items():
                group[name] = mapped(value, Tensor, Tensor.clone)
        engine.seed(self._module.device, request.terms.seed, 0)
        for p, tag in tags.items():
            p.grad = grads.get(tag)
        try:
            with ambient.enter(request.terms.context):
                optimizer.step()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            kind = type(optimizer).__name__
            text = f"{kind} differentiates the gradients, whose graphs are in your process"
            raise TypeError(f"optimizer: {text}: use {kind}(model.parameters(), ...)") from error
        finally:
            self._last = {}
            for p in tags:
                p.grad = None
        return Row()

    # Coming and going.

    def resume(self, request: ResumeRequest) -> None:
        """Make the optimizers; the weights have come with the state."""
        if self._module.device.type == "cpu":
            threads.return_large_blocks()
        for tag, one in self._module.tracked.items():  # the master's contents are older from now on
            one.trained = tag in request.stepped
        self._optimizers = {}
        row = [t.detach().clone() for t in request.optimizers.tensors]
        for number, one in request.optimizers.load(row).items():
            kind, keywords, told, state, attributes = one
            params: dict[int, nn.Parameter] = {}
            for group in told[1:]:
                on_host = not (group.get("capturable") or group.get("fused"))
                for tag in group["params"]:
                    # The module's memory and version, in an object of its own.
                    t = self._module.tracked[tag].tensor
                    params[tag] = nn.Parameter(t, t.is_floating_point() or t.is_complex())
                    vars(params[tag]).update(attributes.get(tag, {}))
                    step = state.get(tag, {}).get("step")
                    if isinstance(step, Tensor) and on_host:  # as torch's own loading does
                        state[tag]["step"] = step.cpu()
                group["params"] = [params[tag] for tag in group["params"]]
            optimizer = kind([{**group} for group in told[1:]], **keywords)
            for made, values in zip((vars(optimizer), *optimizer.param_groups), told, strict=True):
                made.update(values)  # the constructor may have changed its copies
            optimizer.state.update((params.get(n, n), held) for n, held in state.items())
            self._optimizers[number] = optimizer, {p: tag for tag, p in params.items()}

    def snapshot(self, request: SnapshotRequest) -> Parcel:
        """Give the weights, or each optimizer's groups and state, by tag."""
        weights: dict[int, Tensor] = {}
        states: dict[int, tuple[Sequence[object], dict[object, object]]] = {}
        for number, (optimizer, tags) in self._optimizers.items():
            weights.update((tag, p.detach()) for p, tag in tags.items())
            rows, own = optimizer.param_groups, optimizer.state
            groups = [{**row, "params": [tags[p] for p in row["params"]]} for row in rows]
            groups.insert(0, plain(vars(optimizer)))
            states[number] = groups, {tags.get(p, p): held for p, held in own.items()}
        return parcel(weights if request.of == "weights" else states, "optimizer")
