"""Recipes, apart from what runs them: what they keep in memory, and what they refuse."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raydp_parallel.calls import replay
from raydp_parallel.devices import ambient_state
from raydp_parallel.errors import StateChanged
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import INLINE_LIMIT, Attachments, InlineLink
from raydp_parallel.transport.messages import ForwardRequest, Parcel, StateUpdate

SMALL, LARGE = 4, INLINE_LIMIT // 4 + 1
"""Floats of which a recipe may keep the bytes, and floats of which it may not."""


def parcel_of(tensor: Tensor) -> Parcel:
    """A parcel with bytes that lie in the message, however many."""
    return codec.encode((tensor,), Attachments(InlineLink()), "inputs")[0]


def request_of(inputs: Parcel, update: StateUpdate | None = None) -> ForwardRequest:
    """A forward's message."""
    return ForwardRequest(
        1,
        update,
        5,
        0,
        None,
        inputs,
        ambient_state.capture(),
        1,
        1,
        True,
        (),
        False,
        False,
        (),
        None,
    )


@pytest.mark.parametrize(("size", "held"), [(SMALL, True), (LARGE, False)])
def test_a_recipe_holds_tensors_and_not_their_bytes_once_more(size: int, held: bool) -> None:
    """But for a few, which are cheaper to keep than to make again."""
    tensor = torch.arange(float(size))
    parcel = parcel_of(tensor)
    packet, nobody = parcel.packet, sys.getrefcount(parcel.packet)
    nowhere: Any = nn.Module()
    kept = replay.keep(parcel, [tensor], "arguments")
    recipe = replay.forward(request_of(parcel), kept, nowhere, nowhere, (nowhere, nowhere))
    del parcel, kept
    assert (sys.getrefcount(packet) >= nobody) == held
    assert recipe.method == "forward"


def test_a_recipe_holds_nothing_of_an_update() -> None:
    """Contents are not copied for it, nor kept because they were on their way once."""
    update = StateUpdate(1, 7, (3,))
    nobody, nowhere, tensor = sys.getrefcount(update), nn.Module(), torch.ones(SMALL)
    anything: Any = nowhere
    parcel = parcel_of(tensor)
    kept = replay.keep(parcel, [tensor], "arguments")
    recipe = replay.forward(
        request_of(parcel, update), kept, anything, anything, (anything, anything)
    )
    assert sys.getrefcount(update) == nobody
    del recipe


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_is_kept_is_sent_again_as_it_was(size: int) -> None:
    """Not if it was written to since: a different graph in silence would be worse than
    an error.
    """
    tensor = torch.arange(float(size))
    kept = replay.keep(parcel_of(tensor), [tensor], "arguments")
    attachments = Attachments(InlineLink())
    (found,) = codec.decode(kept.again(attachments), attachments, torch.device("cpu"))[0]
    assert torch.equal(found, tensor)
    tensor.add_(1)
    with pytest.raises(StateChanged, match="arguments were written to since the forward"):
        kept.again(attachments)
