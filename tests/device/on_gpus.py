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

_NAMES_CPUS = "it speaks of a driver, or of replicas, without a GPU"
_NEEDS_CPU = "it uses what torch has for tensors of a CPU alone"
_NO_COMPILER = "the stand-in is none for torch's compiler"
LEFT_OUT = {
    _NAMES_CPUS: """test_C3_output_device test_C5_attributes test_F1_tensors_on_two_devices
        test_wrong_arguments test_device_ids_that_name_no_device test_an_address_of_a_client
        test_A3_without_devices test_A8_process_wide_settings_travel[flash]
        test_A8_the_caller_s_default_device test_A10_a_forward_draws_one_number test_G4_dicts
        test_G5_ test_G7_leaves test_gather_undoes_scatter test_F8_what_counts test_F8_keyword
        test_C5_dim_and_device_ids_can_be_edited test_B14_identity_module""",
    _NEEDS_CPU: """test_writes_of_chunk_0_reach_the_master_once[numpy test_T5_gradients_that
        test_an_edit_between_two_forwards_is_seen[numpy test_module_db.py
        test_T3_parameters_that_leave test_torch_is_left_alone""",
    "on a GPU optimizers step all tensors at once, in another order": """
        test_T1_the_bits_of_the_optimizer_in_the_driver[NAdam]
        test_T1_the_bits_of_the_optimizer_in_the_driver[ASGD]""",
    "it counts bytes that go from GPU to GPU here": "test_training_sends_what_the_optimizer",
    _NO_COMPILER: "test_compile.py test_T3_what_reads_the_master_syncs[compiled]",
}
"""Parts of the names of tests that have no meaning on these GPUs, by why."""
NOT_YET = {
    "a tensor that has to be on the CPU goes to the GPU": """test_S12_packed test_X2_all_values
        test_A10_a_generator_that_the_module_holds""",
    "a module without tensors gives its outputs on the CPU": """test_unpicklable_input
        test_generic_aliases test_A11_each_replica_has_locks test_A11_attributes_of_a_class
        test_S9_dataclasses test_a_replica_has_its_own_streams test_objects_that_delegate""",
    "gradients lie on two GPUs where the driver uses both": "upstream_s_do[1-",
}
"""The same of tests that fail, by the defect of the package."""


def asked() -> str:
    """Tell where tests are to run, before pytest has read its arguments."""
    for one, after in itertools.pairwise([*sys.argv, ""]):
        if one.startswith("--device"):
            os.environ[_ASKED] = one.partition("=")[2] or after
    return os.environ.get(_ASKED, "cpu")


def leave_out(item: Any) -> bool:
    """Tell if a test has no meaning here; mark it if it is known to fail."""
    import pytest

    def named(parts: str) -> bool:
        return any(part in item.nodeid for part in parts.split())

    for why, parts in NOT_YET.items():
        if named(parts):
            item.add_marker(pytest.mark.xfail(reason=why))
    # Where the plain module is on the CPU, sums are in another order than on a GPU.
    return any(map(named, LEFT_OUT.values())) or (asked() == "cuda" and named("tied_transformer"))


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

    from raydp_parallel.cluster import replica_set
    from raydp_parallel.cluster.placement import Place
    from raydp_parallel.driver import groups
    from raydp_parallel.wire import trial

    def places(ids: Sequence[Any]) -> tuple[Place, ...]:
        numbers = itertools.count()
        return tuple(Place("gpu", next(numbers) if one == "cpu" else one) for one in ids)

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
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    made = _device_constructors()

    class There(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            placed = {kwargs.get(name) for name in ("device", "out", "pin_memory")} - {None, False}
            if function not in made or placed:
                return function(*args, **kwargs)
            grad = kwargs.pop("requires_grad", False)
            found = function(*args, **kwargs)
            return found.to(device).requires_grad_(grad) if found.is_cpu else found

    return There()


_prepare()  # torch is imported after this
