"""Trains two nets on every GPU, or else on two CPU processes: one that is large enough to gain from
more devices, and one that is too small.

Output::

    Training on cpu, cpu: one process for each
    Images: loss 1.38 -> 0.00, ... ms a step with the processes, ... ms without
    Points: loss 0.68 -> 0.61, ... ms a step with the processes, ... ms without
    Messages to the processes cost some ms in each step, so a net gains once its own step is longer
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import command_line
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel, Executor

STEPS = 40

Data = Callable[[], tuple[Tensor, Tensor]]


def images() -> tuple[Tensor, Tensor]:
    """Noise with a bright quarter, and which quarter that is."""
    pictures, quarters = torch.rand(128, 3, 2, 16, 2, 16), torch.randint(4, (128,))
    pictures[torch.arange(128), :, quarters // 2, :, quarters % 2] += 0.5
    return pictures.reshape(128, 3, 32, 32), quarters


def points() -> tuple[Tensor, Tensor]:
    """Points on the two arms of a spiral, and the arm that each one is on."""
    arms, radius = torch.arange(256) % 2, torch.rand(256)
    angle = 6 * radius + torch.pi * arms
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms


def of_images() -> nn.Module:
    """A small convolutional net."""
    first = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()
    second = nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(128, 4))


def of_points() -> nn.Module:
    """A tiny net."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )


def train(model: nn.Module, data: Data) -> tuple[float, float, float]:
    """The plain loop; returns the first and the last loss, and milliseconds per step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(data()[0])  # the first call is the slowest
    torch.manual_seed(0)
    losses, begun = [], time.perf_counter()
    for _ in range(STEPS):
        x, y = data()
        out = model(x)
        loss = nn.functional.cross_entropy(out, y.to(out.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1], (time.perf_counter() - begun) / STEPS * 1e3


def main(device_ids: list[str | int] | None = None) -> None:
    """Trains both nets with the wrapper and without it."""
    if device_ids is None and not torch.cuda.is_available():
        device_ids = ["cpu", "cpu"]
    with Executor(device_ids) as executor:
        print(f"Training on {', '.join(map(str, executor.device_ids))}: one process for each")
        for make, data in ((of_images, images), (of_points, points)):
            torch.manual_seed(0)
            net = make()
            plain = copy.deepcopy(net)
            first, last, step = train(DataParallel(net, executor=executor), data)
            _, _, alone = train(plain, data)
            print(
                f"{data.__name__.title()}: loss {first:.2f} -> {last:.2f}, {step:.0f} ms a step "
                f"with the processes, {alone:.0f} ms without"
            )
    print(
        "Messages to the processes cost some ms in each step, so a net gains once its own step is "
        "longer"
    )


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="all"))
