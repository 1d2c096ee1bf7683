"""One Ray for the whole suite: a node with two GPUs that it only counts, so that cluster logic runs without any."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--link shared``, or ``collective``, runs the suite with another link than the default."""
    parser.addoption("--link", default="auto", help="the link of tests that do not choose one: Options(link=...)")


def pytest_configure(config: pytest.Config) -> None:
    """Make the chosen link the default."""
    from raydp_parallel import Options

    Options.__init__.__kwdefaults__["link"] = config.getoption("--link")
    config.addinivalue_line("markers", "copies: about the copies of small tensors, which --link shared does without")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--link shared`` nothing is copied."""
    if config.getoption("--link") == "shared":
        for item in items:
            if item.get_closest_marker("copies") is not None:
                item.add_marker(pytest.mark.skip(reason="with --link shared nothing is copied"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A running Ray node with 1 CPU, so that replicas compute with one thread, and 2 fake GPUs."""
    start_ray()
    yield
    stop_ray()


def start_ray(**options: object) -> None:
    """Start the suite's Ray, unless it runs."""
    import ray

    if not ray.is_initialized():
        settings = {"num_cpus": 1, "num_gpus": 2, "include_dashboard": False, "log_to_driver": False, **options}
        ray.init(**settings)  # type: ignore[arg-type]


def stop_ray() -> None:
    """End the suite's replicas and its Ray."""
    import ray

    import raydp_parallel

    raydp_parallel.shutdown()
    ray.shutdown()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts with the same random numbers, and computes with one thread, as the replicas do."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
