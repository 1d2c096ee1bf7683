"""A GPT-2-style language model: bfloat16 autocast, four micro-batches per step, and a training that
is stopped, kept in a file, and resumed with the same bits.

Output::

    loss 2.9028 -> 1.2429
    resumed at step 20, the last losses are the same: True
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import command_line
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydp_parallel import DataParallel

WORDS, WIDTH, HEADS, LAYERS, CONTEXT = 16, 32, 4, 2, 24
MICRO_BATCHES, ROWS = 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, steps, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, steps, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(rows, steps, WIDTH))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Returns a loss for each row, so that no logits travel to the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1] - 1, device=text.device)
        x = self.blocks(self.words(text[:, :-1]) + self.places(places))
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").mean(1)


def sentences(step: int) -> Tensor:
    """Sequences that count up or down from a random word; the same for the same step."""
    draw = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (MICRO_BATCHES * ROWS, 1), generator=draw)
    pace = torch.randint(1, 3, (MICRO_BATCHES * ROWS, 1), generator=draw)
    return (start + pace * torch.arange(CONTEXT)) % WORDS


class Training:
    """A model, its optimizer and its schedule, which go into one checkpoint."""

    def __init__(self, device_ids: list[str | int] | None, steps: int) -> None:
        torch.manual_seed(0)
        self.model = DataParallel(LanguageModel(), device_ids)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.01, steps)
        self.step = 0

    def advance(self) -> float:
        """One step; returns its loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for text in sentences(self.step).chunk(MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.model(text).mean() / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return total

    def save(self, path: Path) -> None:
        parts = {
            name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")
        }
        torch.save({**parts, "step": self.step, "random": torch.get_rng_state()}, path)

    def load(self, path: Path) -> None:
        parts = torch.load(path)
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(parts[name])
        self.step = parts["step"]
        torch.set_rng_state(parts["random"])


def main(device_ids: list[str | int] | None = None, steps: int = 40) -> list[float]:
    """Trains, resumes half-way, and returns the loss of each step."""
    training = Training(device_ids, steps)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        for step in range(steps):
            if step == steps // 2:
                training.save(path)
            losses.append(training.advance())
        resumed = Training(device_ids, steps)
        resumed.load(path)
    begun = resumed.step
    again = [resumed.advance() for _ in range(begun, steps)]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"resumed at step {begun}, the last losses are the same: {again == losses[begun:]}")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
