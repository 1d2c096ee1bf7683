"""Hugging Face's ``Trainer`` on replicas. The files that it saves are the model's own, so
``from_pretrained`` loads them.

Output::

    loss 0.6964 -> 0.0059
    accuracy 100 %
    loaded again: True
"""

from __future__ import annotations

import tempfile
from typing import Any

import command_line
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)

from raydp_parallel import DataParallel
from raydp_parallel.hugging_face import attach

WORDS, LENGTH = 32, 12


class Sentences(Dataset[dict[str, Tensor]]):
    """Random sentences; the label says whether word 1 is in it."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.words = torch.randint(2, WORDS, (count, LENGTH), generator=draw)
        self.labels = torch.randint(2, (count,), generator=draw)
        places = torch.randint(LENGTH, (count,), generator=draw)
        self.words[self.labels == 1, places[self.labels == 1]] = 1

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main(device_ids: list[str | int] | None = None, epochs: int = 3) -> list[float]:
    """Trains, and returns the losses that the trainer logged."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=128,
            learning_rate=3e-3,
            logging_steps=4,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(
            net,
            arguments,
            train_dataset=Sentences(1024, seed=1),
            eval_dataset=Sentences(256, seed=2),
            compute_metrics=accuracy,
        )
        attach(trainer, DataParallel(net, device_ids))
        trainer.train()
        found: dict[str, Any] = trainer.evaluate()
        trainer.save_model(folder)
        again = BertForSequenceClassification.from_pretrained(folder)
    saved = all(map(torch.equal, again.state_dict().values(), net.state_dict().values()))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}")
    print(f"accuracy {found['eval_accuracy'] * 100:.0f} %")
    print(f"loaded again: {saved}")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
