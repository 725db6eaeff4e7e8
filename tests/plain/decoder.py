"""A decoder-only transformer from the planner's architecture: the units of its programs as modules, one for each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain.block import Block, NormedUnit
from plain.experts import Routing, auxiliary_loss
from plain.functions import cap
from plain.gradients import HeadLoss, applied, at_least_fp32
from plain.places import Rotation, mask_of, positions_of, rotation
from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.model.numerics import Numerics, Rotary

LACKING: dict[str, Callable[[Architecture], object]] = {  # what a plan may have that does not run, and the way out
    "multi-token prediction (--set model.num_predict_layers=0 trains without)": lambda architecture: (
        architecture.num_predict_layers
    ),
}


@dataclass(frozen=True, slots=True)
class Output:
    """A micro-batch's part of the step's loss; `routings` has one entry for each layer of experts."""

    loss: Tensor
    routings: tuple[Routing, ...] = ()

    def auxiliary(self, whole: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor | None:
        """The loss that evens the experts' shares out, without its coefficient; see `auxiliary_loss`."""
        return auxiliary_loss(self.routings, whole)


class Embedding(NormedUnit):
    """Token ids [B, T] to hidden states [B, T, D]."""

    def __init__(self, architecture: Architecture, numerics: Numerics) -> None:
        super().__init__("embedding", architecture, numerics)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(ids, self.own("embedding"))
        if self.numerics.embedding_scale != 1.0:
            x = x * self.numerics.embedding_scale
        table = self.if_any("position_embedding")
        if table is not None:
            x = x + F.embedding(positions, table)
        return self.norm(x, "embedding_norm") if self.architecture.embedding_norm else x


class Head(NormedUnit):
    """Hidden states to logits and the loss; a tied head is lent the embedding's weight [V, D]."""

    def __init__(self, architecture: Architecture, numerics: Numerics) -> None:
        lent = frozenset({"head"}) if architecture.tied_embeddings else frozenset()
        super().__init__("head", architecture, numerics, lent)

    def logits(self, x: Tensor, lent: Tensor | None) -> Tensor:
        """[B, T, V], in float32 at least."""
        logits = F.linear(self.norm(x, "final_norm"), self.weight(lent))
        return cap(logits.to(at_least_fp32(logits.dtype)), self.numerics.logit_cap)

    def forward(self, x: Tensor, targets: Tensor, num_targets: int | Tensor, lent: Tensor | None) -> Tensor:
        """Cross-entropy added up over the targets and divided by those of the whole step."""
        y, limit = self.norm(x, "final_norm").flatten(0, 1), self.numerics.logit_cap
        return applied(HeadLoss, y, self.weight(lent), targets.flatten(), limit, 1.0 / num_targets)

    def weight(self, lent: Tensor | None) -> Tensor:
        return self.own("head") if lent is None else lent


class Decoder(nn.Module):
    """All units of a model; layers are keyed by their number in the whole model.

    Raises `InputError` that lists what the architecture has and the engine lacks.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        _require_known(architecture)
        self.architecture, self.numerics = architecture, architecture.numerics
        numerics = architecture.numerics
        self.embedding = Embedding(architecture, numerics)
        layers = {str(layer): Block(architecture, numerics, layer) for layer in range(architecture.num_layers)}
        self.layers = nn.ModuleDict(layers)
        self.head = Head(architecture, numerics)

    def forward(
        self, ids: Tensor, targets: Tensor, num_targets: int | Tensor, document_ids: Tensor | None = None
    ) -> Output:
        """The loss of ids [B, T] over targets [B, T] (`IGNORED`: none), divided by the targets of the whole step.

        With `document_ids` [B, T] a token sees its own document only, and positions begin anew in each.
        Raises `InputError` where the sequence is longer than a learned table of positions.
        """
        x, routings = self.hidden(ids, document_ids)
        return Output(self.head(x, targets, num_targets, self.lent()), routings)

    def logits(self, ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """[B, T, V], in float32 at least."""
        x, _ = self.hidden(ids, document_ids)
        return self.head.logits(x, self.lent())

    def hidden(self, ids: Tensor, document_ids: Tensor | None) -> tuple[Tensor, tuple[Routing, ...]]:
        """The last layer's hidden states [B, T, D], and what the routers did."""
        self.architecture.require_positions(ids.shape[-1])
        positions = positions_of(ids, document_ids)
        x, routings = self.embedding(ids, positions), []
        sights = self.sights(ids, positions, document_ids, x.dtype)
        for block, (angles, mask) in zip(self.layers.values(), sights, strict=True):
            x, routing = block(x, angles, mask)
            routings += [] if routing is None else [routing]
        return x, tuple(routings)

    def sights(
        self, ids: Tensor, positions: Tensor, document_ids: Tensor | None, dtype: torch.dtype
    ) -> Iterator[tuple[Rotation | None, Tensor | None]]:
        """Each layer's angles and mask; layers that are alike share them."""
        rotated = self.architecture.rope_head_dim or self.architecture.head_dim
        angles: dict[Rotary, Rotation] = {}
        masks: dict[int | None, Tensor | None] = {}
        for layer in map(int, self.layers):
            window, rotary = self.architecture.window(layer), self.rotary(layer)
            if window not in masks:
                masks[window] = mask_of(ids, window, document_ids)
            if rotary is not None and rotary not in angles:
                angles[rotary] = rotation(positions, rotated, rotary, dtype)
            yield (None if rotary is None else angles[rotary]), masks[window]

    def rotary(self, layer: int) -> Rotary | None:
        if self.architecture.positions != "rotary":
            return None
        local = self.numerics.local_rotary
        return self.numerics.rotary if local is None or self.architecture.window(layer) is None else local

    def lent(self) -> Tensor | None:
        """The embedding's weight, where the head is tied to it."""
        return self.embedding.own("embedding") if self.architecture.tied_embeddings else None


def _require_known(architecture: Architecture) -> None:
    lacking = [name for name, has in LACKING.items() if has(architecture)]
    if lacking:
        raise InputError(f"model {architecture.name}: found what is planned and not yet runnable: {'; '.join(lacking)}")


def build(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder on the meta device: its parameters have shapes and no memory. Raises `InputError` as `Decoder` does."""
    with torch.device("meta"):
        model = Decoder(architecture)
    for parameter in model.parameters():  # and not the buffers: steps of a balance bias would vanish in bf16
        parameter.data = parameter.data.to(dtype)
    return model
