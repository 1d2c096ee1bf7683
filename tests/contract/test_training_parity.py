"""Twenty steps of training a real architecture are upstream's, step by step."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same_grads, assert_same_state, tiny_gpt2, trio
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 20


def texts(step: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask that pads some rows."""
    generator = torch.Generator().manual_seed(100 + step)
    mask = torch.ones(7, 12, dtype=torch.int64)
    mask[1::2, 9:] = 0
    return torch.randint(48, (7, 12), generator=generator), mask


def next_token(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Predict each next token; the loss is outside, from the gathered logits."""
    logits = model(input_ids=ids, attention_mask=mask)["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("replicas", [2, 3])
def test_tied_transformer(replicas):
    """All is equal bit by bit; decay would show parameters without a gradient."""
    ours, theirs, _ = trio(tiny_gpt2(), replicas)
    assert ours.module.lm_head.weight is ours.module.transformer.wte.weight
    both = [(m, torch.optim.AdamW(m.parameters(), 3e-3, weight_decay=0.1)) for m in (ours, theirs)]
    for step in range(STEPS):
        losses = []
        for model, optimizer in both:
            optimizer.zero_grad()
            losses.append(next_token(model, *texts(step)))
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
        assert_same_grads(ours, theirs, rtol=0, atol=0)
    assert_same_state(ours, theirs, rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(*[next_token(one.eval(), *texts(STEPS)) for one in (ours, theirs)])
    assert ours.module.lm_head.weight is ours.module.transformer.wte.weight
