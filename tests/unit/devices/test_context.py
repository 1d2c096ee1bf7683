"""The caller's ambient torch state, captured and entered."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raydp_parallel.devices import ambient_state


@pytest.fixture(autouse=True)
def process_wide_settings() -> Iterator[None]:
    """Every test leaves the process as it found it."""
    before = ambient_state.capture()
    yield
    with ambient_state.enter(before):
        pass
    assert ambient_state.capture() == before


def seen_inside(captured: ambient_state.CallContext) -> ambient_state.CallContext:
    """What a block sees that runs under a captured state, after a trip."""
    with ambient_state.enter(pickle.loads(pickle.dumps(captured))):
        return ambient_state.capture()


def capture_under(*managers: contextlib.AbstractContextManager[Any]) -> ambient_state.CallContext:
    """The state under some context managers."""
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        return ambient_state.capture()


AMBIENT: dict[str, Callable[[], list[contextlib.AbstractContextManager[Any]]]] = {
    "nothing": list,
    "no_grad": lambda: [torch.no_grad()],
    "inference_mode": lambda: [torch.inference_mode()],
    "grad inside inference": lambda: [torch.inference_mode(), torch.enable_grad()],
    "autocast bfloat16": lambda: [torch.autocast("cpu", dtype=torch.bfloat16)],
    "autocast float16": lambda: [torch.autocast("cpu", dtype=torch.float16)],
    "autocast without cache": lambda: [
        torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    ],
    "autocast ended inside": lambda: [torch.autocast("cpu"), torch.autocast("cpu", enabled=False)],
    "anomaly": lambda: [torch.autograd.detect_anomaly(check_nan=True)],
    "anomaly without NaN check": lambda: [torch.autograd.detect_anomaly(check_nan=False)],
    "all at once": lambda: [
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.float16),
        torch.autograd.detect_anomaly(),
    ],
}


@pytest.mark.parametrize("name", [*AMBIENT])
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_A8_ambient_modes_travel(name: str) -> None:
    """What a block sees is what the caller saw, from any state before, and afterwards all is as it
    was.
    """
    captured = capture_under(*AMBIENT[name]())
    before = ambient_state.capture()
    found = seen_inside(captured)
    if name == "grad inside inference":
        assert found == captured._replace(grad=False)
    else:
        assert found == captured
    assert ambient_state.capture() == before
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        around = ambient_state.capture()
        assert seen_inside(captured)[:4] == found[:4]
        assert ambient_state.capture() == around


@pytest.mark.parametrize("name", ("nothing", "no_grad", "inference_mode", "autocast float16"))
def test_A8_what_a_block_computes(name: str) -> None:
    """Requiring a gradient, being an inference tensor, and the dtype of a product follow the
    caller.
    """

    def compute() -> tuple[bool, bool, torch.dtype]:
        out = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
        return out.requires_grad, out.is_inference(), out.dtype

    with contextlib.ExitStack() as stack:
        for manager in AMBIENT[name]():
            stack.enter_context(manager)
        expected, captured = compute(), ambient_state.capture()
    with ambient_state.enter(captured):
        assert compute() == expected


def set_matmul(value: str) -> None:
    torch.set_float32_matmul_precision(value)


def set_flag(holder: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets one attribute."""
    return lambda: setattr(holder, name, value)


FLAGS: dict[str, Callable[[], None]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic, warn only": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn enabled": set_flag(torch.backends.cudnn, "enabled", False),
    "cudnn benchmark": set_flag(torch.backends.cudnn, "benchmark", True),
    "cudnn deterministic": set_flag(torch.backends.cudnn, "deterministic", True),
    "cudnn tf32": lambda: torch._C._set_cudnn_allow_tf32(False),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "memory-efficient attention": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "math attention": lambda: torch.backends.cuda.enable_math_sdp(False),
    "cudnn attention": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "short sums of float16": set_flag(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "short sums of bfloat16": set_flag(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
}
if hasattr(torch._C, "_get_cublas_allow_fp16_accumulation"):
    FLAGS["accumulation in float16"] = set_flag(
        torch.backends.cuda.matmul, "allow_fp16_accumulation", True
    )
if hasattr(torch._C, "_get_fp32_precision_getter"):
    FLAGS["precision of everything"] = set_flag(torch.backends, "fp32_precision", "tf32")
    FLAGS["precision of products"] = set_flag(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    FLAGS["precision of convolutions"] = set_flag(
        torch.backends.cudnn.conv, "fp32_precision", "ieee"
    )
    FLAGS["precision of a CPU's products"] = set_flag(
        torch.backends.mkldnn.matmul, "fp32_precision", "bf16"
    )


@pytest.mark.parametrize("name", [*FLAGS])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_A8_process_wide_settings_travel(name: str) -> None:
    """A replica sets them before it runs, both ways."""
    before = ambient_state.capture()
    FLAGS[name]()
    changed = ambient_state.capture()
    assert changed.flags != before.flags
    assert seen_inside(before).flags == before.flags
    assert seen_inside(changed).flags == changed.flags
    assert seen_inside(before).flags == before.flags


def test_A8_variables_that_change_results_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are set, to replicas that start; what deterministic algorithms ask for, with each
    call.
    """
    for name in ambient_state.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert ambient_state.environment() == {"NVIDIA_TF32_OVERRIDE": "0"}
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    plain = ambient_state.capture()
    torch.use_deterministic_algorithms(True)
    captured = ambient_state.capture()
    with ambient_state.enter(plain):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")  # as in a replica that was there before
    with ambient_state.enter(captured):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_A8_modes_are_left_when_a_block_raises() -> None:
    """An exception of the user's module leaves no mode behind."""
    captured = capture_under(torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16))
    before = ambient_state.capture()
    with pytest.raises(KeyError), ambient_state.enter(captured):
        raise KeyError
    assert ambient_state.capture() == before
