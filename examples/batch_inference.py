"""Inference with ``map``: each batch goes to one replica while the loader makes the next one, and
outputs come in order. A batch that cannot be computed is skipped.

Output::

    19 of 20 batches, 2432 rows
    the classes are those of the plain net: True
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import command_line
import torch
from torch import Tensor, nn

from raydp_parallel import DataParallel

BATCHES, ROWS, FEATURES = 20, 128, 64
SPOILED = 5


def batches() -> Iterator[Tensor]:
    """Make what a loader gives; one batch has a column too few."""
    for number in range(BATCHES):
        draw = torch.Generator().manual_seed(number)
        yield torch.randn(ROWS, FEATURES - (number == SPOILED), generator=draw)


def main(device_ids: list[str | int] | None = None) -> list[Tensor]:
    """Computes, and returns the classes of each batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
    model = DataParallel(net, device_ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at the end `map` warns of what it skipped
        scores = model.map(batches(), on_error="skip")
        classes = [one.argmax(1).cpu() for one in scores]
    with torch.no_grad():
        plain = [net(x).argmax(1) for number, x in enumerate(batches()) if number != SPOILED]
    print(f"{len(classes)} of {BATCHES} batches, {sum(map(len, classes))} rows")
    same = all(map(torch.equal, classes, plain))
    print(f"the classes are those of the plain net: {same}")
    return classes


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
