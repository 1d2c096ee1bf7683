"""The classic tutorial of DataParallel: each replica prints the rows it was given, the loop sees
the whole batch. With one device the module runs in place, as upstream's does.

Output::

    Outside: input size torch.Size([30, 5]) output_size torch.Size([30, 2])
    Outside: input size torch.Size([10, 5]) output_size torch.Size([10, 2])
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else Ray folds equal lines of two replicas into one

import command_line
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raydp_parallel import DataParallel

INPUT_SIZE = 5
OUTPUT_SIZE = 2
BATCH_SIZE = 30
DATA_SIZE = 100


class RandomDataset(Dataset):
    def __init__(self, size: int, length: int):
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


class Model(nn.Module):
    def __init__(self, input_size: int, output_size: int):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.fc(input)
        print("\tIn Model: input size", input.size(), "output size", output.size())
        return output


def run(device_ids: list[str | int] | None) -> list[int]:
    """Sends the whole dataset through the model, and returns the rows that each batch gave
    outside.
    """
    torch.manual_seed(0)
    loader = DataLoader(RandomDataset(INPUT_SIZE, DATA_SIZE), batch_size=BATCH_SIZE)
    model = DataParallel(Model(INPUT_SIZE, OUTPUT_SIZE), device_ids)
    print(f"Devices: {model.device_ids}", flush=True)

    rows = []
    for data in loader:
        output = model(data)
        print("Outside: input size", data.size(), "output_size", output.size(), flush=True)
        rows.append(len(output))
    time.sleep(1)  # Ray brings the prints of the replicas to this terminal a moment later
    return rows


def main(device_ids: list[str | int] | None = None) -> list[list[int]]:
    """Runs with the first 1, 2 and 3 of the devices, or once with no ``device_ids``."""
    if device_ids is None:
        return [run(None)]
    return [run(device_ids[:count]) for count in (1, 2, 3) if count <= len(device_ids)]


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu,cpu"))
