"""PEFT's LoRA on a wrapped GPT-2: only the adapters and the head are trained and sent with each
step, the base weights once.

Output::

    loss 3.4855 -> 0.0266
    trained 9216 of 37248 parameters
    the adapter alone is saved: 17 tensors
"""

from __future__ import annotations

import command_line
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from raydp_parallel import DataParallel, Options

WORDS, LENGTH, ROWS = 32, 16, 32


def sentences() -> torch.Tensor:
    """Sequences that count up from a random word."""
    return (torch.randint(WORDS, (ROWS, 1)) + torch.arange(LENGTH)) % WORDS


def main(device_ids: list[str | int] | None = None, steps: int = 60) -> list[float]:
    """Trains the adapters, and returns the loss of each step."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["c_attn", "c_proj", "c_fc"],
        modules_to_save=["lm_head"],
        fan_in_fan_out=True,
    )
    net = get_peft_model(GPT2LMHeadModel(config), lora)
    model = DataParallel(net, device_ids, options=Options(scalars="mean"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=0.02)

    losses = []
    for _ in range(steps):
        words = sentences()
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"trained {sum(p.numel() for p in trained)} of {count} parameters")
    kept = get_peft_model_state_dict(model.module)
    print(f"the adapter alone is saved: {len(kept)} tensors")
    return losses


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
