"""A bi-LSTM over sequences of different lengths. The batch is one ``PackedSequence``: it is split
by sequence, as a tensor is by row, and the outputs are one again.

Output::

    loss 0.6913 -> 0.1105
    outputs: 64 sequences, the longest of 12 steps
"""

from __future__ import annotations

import command_line
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from raydp_parallel import DataParallel

SEQUENCES = 64


class Tagger(nn.Module):
    """A score for each step of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 16, bidirectional=True)
        self.head = nn.Linear(32, 1)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        states, _ = self.lstm(packed)
        return states._replace(data=self.head(states.data))


def sequences() -> tuple[PackedSequence, Tensor]:
    """Random numbers; a step's tag says whether the sum of its two neighbours is positive."""
    lengths = torch.randint(4, 13, (SEQUENCES,))
    lengths[0] = 12
    numbers = [torch.randn(int(length), 1) for length in lengths]
    tags = []
    for one in numbers:
        around = torch.cat([torch.zeros(1, 1), one, torch.zeros(1, 1)])
        tags.append(((around[:-2] + around[2:]) > 0).float())
    packed = pack_sequence(numbers, enforce_sorted=False)
    return packed, pack_sequence(tags, enforce_sorted=False).data


def main(device_ids: list[str | int] | None = None, steps: int = 60) -> list[float]:
    """Trains, and returns the loss of each step."""
    torch.manual_seed(0)
    model = DataParallel(Tagger(), device_ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    losses = []
    for _ in range(steps):
        packed, tags = sequences()
        scores = model(packed)
        loss = nn.functional.binary_cross_entropy_with_logits(
            scores.data, tags.to(scores.data.device)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    _, lengths = pad_packed_sequence(scores)
    print(f"outputs: {len(lengths)} sequences, the longest of {int(lengths.max())} steps")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
