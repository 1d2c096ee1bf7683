"""The settings: their defaults, and what they refuse."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import re
from typing import Any

import pytest
import torch
from harness import Apply, printed

from raydp_parallel import DataParallel
from raydp_parallel.options import Options


def test_frozen_and_by_keyword() -> None:
    """They cannot change under an executor that was made with them, and read as what they mean."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("none")  # type: ignore[misc]
    for name, text in (("thread", "has no 'thread'; it has threads$"), ("x", "'x'; it has sc")):
        with pytest.raises(TypeError, match=text):
            Options(**{name: 1})
    assert "threads" in inspect.signature(Options).parameters


def test_every_field_is_documented() -> None:
    """A knob without a word about it is not a knob."""
    doc = inspect.getdoc(Options)
    assert doc is not None
    assert all(f"\n    {field.name}: " in doc for field in dataclasses.fields(Options))


BAD: dict[str, list[Any]] = {
    "gpu_paths": [("peer",), "host", [["host"]]],
    "chunk_weights": [(), (0, 1), (-1, 2), (math.inf, 1), (math.nan, 1), ("1", 2), (True, 1), "no"],
    "placement_timeout": [0, -1.0, math.inf, math.nan, 1e7],
    "call_timeout": [0.0, math.inf, math.nan, 1e7],
    "cpus_per_replica": [-1, math.nan],
    "gpus_per_replica": [0, 2, -0.5],
    "threads": [0],
    "name": ["", "a/b", "me@host", "red\x1b[31m", "two\nlines", "\u202egnp.exe"],
    "resources": [{"disk": 0}, {"disk": -1.0}, {"disk": "1"}, {"disk": True}, {"GPU": 1}, {1: 1}],
}
WRONG: dict[str, list[Any]] = {
    "gpus_per_replica": ["1"],
    "gpu_paths": [5, None],
    "chunk_weights": [4, {1: 2}, torch.ones(2)],
    "threads": [2.5],
    "cpus_per_replica": [None],
    "placement_timeout": ["60", True],
    "call_timeout": ["1"],
    "resources": [["disk"]],
    "label_selector": ["zone=a"],
}

KINDS = [(ValueError, BAD), (TypeError, WRONG)]


@pytest.mark.parametrize(
    "error,name,value", [(e, n, v) for e, of in KINDS for n, bad in of.items() for v in bad]
)
def test_a_bad_value_is_refused_at_once(error: Any, name: str, value: Any) -> None:
    """The error names the option and the value."""
    with pytest.raises(error, match=rf"Options\({name}={re.escape(repr(value))}\): expected"):
        Options(**{name: value})


def test_a_torch_that_lacks_private_names() -> None:
    """Is imported all the same, and computes by its public functions."""
    code = """
import torch
torch.compiler.disable = lambda function: function
for owner, name in (
    (torch._C, "_get_fp32_precision_getter"),
    (torch._C, "_set_fp32_precision_setter"),
    (torch._C, "_storage_Use_Count"),
    (torch._C._functorch, "peek_interpreter_stack"),
    (torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    (torch._C._dynamo.eval_frame, "_FrameAction"),
    (torch._C._dynamo.eval_frame, "_FrameExecStrategy"),
    (torch.cuda.memory, "_set_allocator_settings"),
    (torch.distributed.ProcessGroupGloo, "_Options"),
    (torch.backends.cuda, "cudnn_sdp_enabled"),
):
    delattr(owner, name)
import raydp_parallel
from raydp_parallel.devices import ambient
from raydp_parallel.replica.engine import BackwardRequest, differentiate
context = ambient.capture()
torch.set_default_dtype(torch.double)
leaf = torch.ones(2, requires_grad=True)
with ambient.enter(context):
    assert torch.get_default_dtype() is torch.float
    out = raydp_parallel.DataParallel(torch.nn.Identity(), ["cpu"])(leaf * 2)
    request = BackwardRequest(None, 0, (), [], b"\\1", False, False, None, {})
    (grad,) = differentiate([out], [torch.ones(2)], [leaf], request)
assert grad.tolist() == [2, 2]
ambient.refuse_transforms()
"""
    printed("-c", code)


def test_defaults_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As this suite does; `dataclasses.replace` keeps what it is not given."""
    monkeypatch.setitem(Options.__init__.__kwdefaults__, "threads", 3)
    assert Options().threads == 3
    assert dataclasses.replace(Options(threads=2), name="a") == Options(threads=2, name="a")


def test_dicts_are_copied() -> None:
    """They are part of a key, travel, and read as dicts."""
    mine = {"disk": 1}
    options = Options(resources=mine, label_selector={"zone": "in(a, b)"})
    mine["disk"] = 2
    assert options.resources == {"disk": 1} and options.resources["disk"] == 1
    assert options == Options(resources={"disk": 1}, label_selector={"zone": "in(a, b)"})
    same = dataclasses.replace(options), pickle.loads(pickle.dumps(options))
    assert len({options, *same, Options()}) == 2


def test_X2_counts_of_weights() -> None:
    """One for each device, also where ``device_ids`` are edited later; sizes follow."""
    options, net = Options(chunk_weights=[3, 1]), Apply(lambda _net, x: (x, len(x)))  # type: ignore[arg-type]
    assert options.chunk_weights == (3, 1) and hash(options)
    with pytest.raises(ValueError, match=r"2 weights for 3 devices \['cpu', 'cpu', 'cpu'\]"):
        DataParallel(net, ["cpu"] * 3, options=options)
    model = DataParallel(net, ["cpu"] * 2, options=options)
    for rows, expected in ((8, [6, 2]), (3, [2, 1]), (2, [1, 1]), (1, [1])):
        assert model(torch.randn(rows, 4))[1] == expected
    model.device_ids = ["cpu"] * 3
    with pytest.raises(ValueError, match="2 weights for 3 devices"):
        model(torch.randn(8, 4))
