"""Tests on stand-in GPUs: ``--device cuda`` and its places.

``"cpu"`` entries name GPUs then, and replicas are processes with one each. With ``cuda`` the driver
has no GPU. With ``cuda:0`` or ``cuda:1`` it has all, the tests' modules and inputs lie there, and
one replica shares the driver's GPU.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

PLACES = ("cpu", "cuda", "cuda:0", "cuda:1")
_ASKED = "STANDIN_PLACE"
GPUS = 8

_COUNTS = "it counts what replicas without a GPU get, or the GPUs of the tests' cluster"
_ORDER = "its sums are in another order on a GPU, and the plain module is on the CPU"
LEFT_OUT = {
    _COUNTS: """test_an_address_of_a_client test_device_ids_that_name_no_device[ids2
        test_A3_without_devices test_replicas_are_described test_stats_count
        test_device_ids_of_every_kind""",
    "its replicas use NumPy on tensors": "test_writes_of_chunk_0_reach_the_master_once[numpy",
    "the stand-in has no tensors in compressed rows": "test_A8_the_caller_s_default_device",
}
"""Parts of the names of tests that have no meaning on these GPUs, by why."""
WITHOUT_ONE_HERE = {
    _ORDER: """tied_transformer test_T1_the_bits_of_the_optimizer_in_the_driver[NAdam]
        test_T1_the_bits_of_the_optimizer_in_the_driver[ASGD]""",
}
"""The same where the driver has no GPU."""
WITH_ONE_HERE = {
    "NumPy, and functions of Python, take tensors of the CPU alone": """
        test_an_edit_between_two_forwards_is_seen[numpy test_T5_gradients_that_the_program_keeps
        test_T5_gradients_that_the_program_changes[numpy changes[a&function]""",
    "DLPack gives tensors of the current GPU alone": "that_the_program_changes[dlpack]",
    "it says that outputs are on the CPU": "test_C3_output_device",
    "a chunk's targets are out of range, as an assert says": "[nn.MultiLabelMarginLoss",
    "inductor's code is for real GPUs": "test_a_graph_break_with_the_same_results[inductor",
    "it looks for what lies in windows of the host": "test_poison_shows_an_output",
}
"""The same where it has some."""


def asked() -> str:
    """Tell where tests are to run, before pytest has read its arguments."""
    for one, after in itertools.pairwise([*sys.argv, ""]):
        if one.startswith("--device"):
            os.environ[_ASKED] = one.partition("=")[2] or after
    return os.environ.get(_ASKED, "cpu")


def leave_out(name: str) -> bool:
    """Tell if a test has no meaning here."""
    more = WITHOUT_ONE_HERE if asked() == "cuda" else WITH_ONE_HERE
    parts = " ".join([*LEFT_OUT.values(), *more.values()]).split()
    return any(part.replace("&", " ") in name for part in parts)


def _prepare() -> None:
    place = asked()
    if place == "cpu":
        return
    import standin

    os.environ["STANDIN_GPUS"] = str(GPUS)
    if place == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if standin.LIBRARY not in os.environ:  # else Python's start has done it
        standin.install()


def use() -> None:
    """Let ``"cpu"`` entries name GPUs."""
    if asked() == "cpu":
        return
    import oracle
    import torch

    from raydp_parallel import functional, wrapper
    from raydp_parallel.cluster import replica_set
    from raydp_parallel.cluster.placement import Place
    from raydp_parallel.driver import groups
    from raydp_parallel.wire import trial

    def places(ids: Sequence[Any]) -> tuple[Place, ...]:
        numbers = itertools.count()
        return tuple(Place("gpu", next(numbers) if one == "cpu" else one) for one in ids)

    def module_device(module: Any, ids: Sequence[Any] = ()) -> Any:
        parts = itertools.chain(module.parameters(), module.buffers())
        return next((t.device for t in parts), oracle.place if "cpu" in ids else first(module, ids))

    first = functional.module_device
    functional.module_device = wrapper.module_device = module_device
    replica_set.places = places
    torch.backends.cuda.enable_flash_sdp(False)  # CPUs have another one, with other bits
    trial.SIZES[:], trial._PRODUCTS = [1 << 12, 1 << 16], 1
    groups._LEAST = 1  # what is as small as a test goes by NCCL, too
    oracle.place = torch.device("cpu" if asked() == "cuda" else asked())


def place() -> None:
    """Let what tests make from now on, in any thread, lie on the driver's GPU."""
    if asked() in ("cpu", "cuda"):
        return
    run: Any = threading.Thread.run

    def run_there(thread: threading.Thread) -> None:
        with there(asked()):
            run(thread)

    threading.Thread.run = run_there  # type: ignore[method-assign]
    there(asked()).__enter__()


@contextmanager
def watched() -> Iterator[None]:
    """Have a look at the device after a test."""
    if asked() in ("cpu", "cuda"):
        yield
        return
    import standin
    import torch

    torn = standin.number("torn")
    yield
    torch.accelerator.synchronize()
    assert standin.number("torn") == torn, "memory was unregistered while a copy used it"


def there(device: str) -> AbstractContextManager[Any]:
    """Let tensors that are made without a device, on the CPU as ever, be moved to one."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    made = _device_constructors() - {torch.as_tensor}  # torch gives it numbers that stay here

    class There(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            placed = {kwargs.get(name) for name in ("device", "out", "pin_memory")} - {None, False}
            maker = sys._getframe(1).f_globals.get("__name__", "")
            if function not in made or placed or maker.startswith("torch.optim"):  # its `step`
                return function(*args, **kwargs)
            grad = kwargs.pop("requires_grad", False)
            found = function(*args, **kwargs)
            return found.to(device).requires_grad_(grad) if found.is_cpu else found

    return There()


_prepare()  # torch is imported after this
