"""A decoder-only transformer from the planner's architecture: the units of its programs as modules, one for each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain.block import Block, NormedUnit, Result
from plain.experts import Routing, auxiliary_loss
from plain.functions import cap
from plain.gradients import IGNORE_INDEX as IGNORED
from plain.gradients import HeadLoss, applied, at_least_fp32
from plain.places import Rotation, mask_of, positions_of, rotation
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import borrowed_weights
from shardwise.model.numerics import Numerics, Rotary
from shardwise.step.parameters import attribute_name


@dataclass(frozen=True, slots=True)
class Output:
    """A micro-batch's part of the step's loss; `routings` has one entry for each block of experts.

    `further` are the losses of multi-token prediction by module, over the same number of targets.
    """

    loss: Tensor
    routings: tuple[Routing, ...] = ()
    further: tuple[Tensor, ...] = ()

    def total(self, prediction_weight: float = 1.0) -> Tensor:
        """What is trained for: the mean of the further losses is added with a weight (DeepSeek-V3's report, equation 25)."""
        return self.loss + prediction_weight / max(len(self.further), 1) * sum(self.further)

    def auxiliary(self, whole: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor | None:
        """The loss that evens the experts' shares out, without its coefficient; see `auxiliary_loss`."""
        return auxiliary_loss(self.routings, whole)


class Embedding(NormedUnit):
    """Token ids [B, T] to hidden states [B, T, D]."""

    def __init__(self, architecture: Architecture, numerics: Numerics) -> None:
        super().__init__("embedding", architecture, numerics)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(ids, self.parameter("embedding"))
        if self.numerics.embedding_scale != 1.0:
            x = x * self.numerics.embedding_scale
        table = self.optional_parameter("position_embedding")
        if table is not None:
            x = x + F.embedding(positions, table)
        return self.norm(x, "embedding_norm") if self.architecture.embedding_norm else x


class Head(NormedUnit):
    """Hidden states to logits and the loss; a tied head is lent the embedding's weight [V, D]."""

    def __init__(self, architecture: Architecture, numerics: Numerics) -> None:
        borrowed = frozenset({"head"}) if architecture.tied_embeddings else frozenset()
        super().__init__("head", architecture, numerics, borrowed)

    def logits(self, x: Tensor, tied_weight: Tensor | None) -> Tensor:
        """[B, T, V], in float32 at least."""
        logits = F.linear(self.norm(x, "final_norm"), self.weight(tied_weight))
        return cap(logits.to(at_least_fp32(logits.dtype)), self.numerics.logit_cap)

    def forward(self, x: Tensor, targets: Tensor, num_targets: int | Tensor, tied_weight: Tensor | None) -> Tensor:
        """Cross-entropy added up over the targets and divided by those of the whole step."""
        y, limit = self.norm(x, "final_norm").flatten(0, 1), self.numerics.logit_cap
        return applied(HeadLoss, y, self.weight(tied_weight), targets.flatten(), limit, 1.0 / num_targets)

    def weight(self, tied_weight: Tensor | None) -> Tensor:
        return self.parameter("head") if tied_weight is None else tied_weight


class Predict(Block):
    """A module of multi-token prediction: a hidden state and an embedding, side by side through M, a block, and a norm before the
    head, which like the embedding is the model's."""

    def __init__(self, architecture: Architecture, numerics: Numerics, unit: str) -> None:
        NormedUnit.__init__(self, unit, architecture, numerics, frozenset(borrowed_weights(architecture, unit)))
        self.keep_balanced()

    def parameter(self, weight: str) -> Tensor:
        return super().parameter(weight if attribute_name(weight) in self.weights else f"block.{weight}")

    def optional_parameter(self, weight: str) -> Tensor | None:
        direct = super().optional_parameter(weight)
        return super().optional_parameter(f"block.{weight}") if direct is None else direct

    def forward(self, h: Tensor, embedded: Tensor, angles: Rotation | None, mask: Tensor | None) -> Result:
        of_embedded, of_hidden = self.parameter("pair_projection").split(h.shape[-1], dim=1)
        pair = self.norm(h, "hidden_norm") @ of_hidden.t() + self.norm(embedded, "embedding_norm") @ of_embedded.t()
        return super().forward(pair, angles, mask)

    def logits(self, h: Tensor, head: Tensor) -> Tensor:
        return cap(F.linear(self.norm(h, "final_norm"), head), self.numerics.logit_cap)


class Decoder(nn.Module):
    """All units of a model; layers are keyed by their number in the whole model."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture, self.numerics = architecture, architecture.numerics
        numerics = architecture.numerics
        self.embedding = Embedding(architecture, numerics)
        layers = {str(layer): Block(architecture, numerics, layer) for layer in range(architecture.num_layers)}
        self.layers = nn.ModuleDict(layers)
        kinds = [*["inner_predict"] * (architecture.num_predict_layers - 1), "predict"][
            : architecture.num_predict_layers
        ]
        self.predict = nn.ModuleList(Predict(architecture, numerics, kind) for kind in kinds)
        self.head = Head(architecture, numerics)

    def forward(
        self, ids: Tensor, targets: Tensor, num_targets: int | Tensor, document_ids: Tensor | None = None
    ) -> Output:
        """The loss of ids [B, T] over targets [B, T] (`IGNORED`: none), divided by the targets of the whole step.

        With `document_ids` [B, T] a token sees its own document only, and positions begin anew in each.
        Raises `InputError` where the sequence is longer than a learned table of positions.
        """
        x, routings = self.hidden(ids, document_ids)
        further = list(self.further(x, ids, targets, num_targets, document_ids))
        routings += tuple(routing for _, routing in further if routing is not None)
        return Output(
            self.head(x, targets, num_targets, self.tied_weight()), routings, tuple(loss for loss, _ in further)
        )

    def further(
        self, h: Tensor, ids: Tensor, targets: Tensor, num_targets: int | Tensor, document_ids: Tensor | None
    ) -> Iterator[tuple[Tensor, Routing | None]]:
        """Each module's loss, and what its router did. Equations 21 to 24 of DeepSeek-V3's report; position i is from 0 here.

        The report's module k has T - k positions: those behind them have the last token again here, and no target.
        """
        positions = positions_of(ids, document_ids)
        for depth, module in enumerate(self.predict, start=1):
            length = ids.shape[1] - depth
            ahead = [*range(depth, ids.shape[1]), *[ids.shape[1] - 1] * depth]
            (sight,) = self.sights([self.architecture.num_layers + depth - 1], ids, positions, document_ids, h.dtype)
            h, routing = module(h, self.embedding(ids[:, ahead], positions), *sight)
            of_same = torch.stack([targets[:, start : start + length] != IGNORED for start in range(depth + 1)]).all(
                dim=0
            )
            targets_of_module = torch.where(of_same, targets[:, depth:], IGNORED)
            logits = module.logits(h[:, :length], self.head.weight(self.tied_weight()))
            loss = F.cross_entropy(
                logits.flatten(0, 1), targets_of_module.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            yield loss / num_targets, routing

    def logits(self, ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """[B, T, V], in float32 at least."""
        x, _ = self.hidden(ids, document_ids)
        return self.head.logits(x, self.tied_weight())

    def hidden(self, ids: Tensor, document_ids: Tensor | None) -> tuple[Tensor, tuple[Routing, ...]]:
        """The last layer's hidden states [B, T, D], and what the routers did."""
        self.architecture.require_positions(ids.shape[-1])
        positions = positions_of(ids, document_ids)
        x, routings = self.embedding(ids, positions), []
        sights = self.sights(map(int, self.layers), ids, positions, document_ids, x.dtype)
        for block, (angles, mask) in zip(self.layers.values(), sights, strict=True):
            x, routing = block(x, angles, mask)
            routings += [] if routing is None else [routing]
        return x, tuple(routings)

    def sights(
        self, layers: Iterable[int], ids: Tensor, positions: Tensor, document_ids: Tensor | None, dtype: torch.dtype
    ) -> Iterator[tuple[Rotation | None, Tensor | None]]:
        """Each layer's angles and mask; layers that are alike share them."""
        angles: dict[tuple[Rotary, int], Rotation] = {}
        masks: dict[int | None, Tensor | None] = {}
        for layer in layers:
            window, rotary = self.architecture.attention_window(layer), self.rotary(layer)
            if window not in masks:
                masks[window] = mask_of(ids, window, document_ids)
            shape = self.architecture.layer_architecture(layer)
            rotated = shape.rope_head_dim or shape.head_dim
            if rotary is not None and (rotary, rotated) not in angles:
                angles[rotary, rotated] = rotation(positions, rotated, rotary, dtype)
            yield (None if rotary is None else angles[rotary, rotated]), masks[window]

    def rotary(self, layer: int) -> Rotary | None:
        if self.architecture.layer_architecture(layer).positions != "rotary":
            return None
        local = self.numerics.local_rotary
        return self.numerics.rotary if local is None or self.architecture.attention_window(layer) is None else local

    def tied_weight(self) -> Tensor | None:
        """The embedding's weight, where the head is tied to it."""
        return self.embedding.parameter("embedding") if self.architecture.tied_embeddings else None


def build(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder on the meta device: its parameters have shapes and no memory."""
    with torch.device("meta"):
        model = Decoder(architecture)
    for parameter in model.parameters():  # and not the buffers: steps of a balance bias would vanish in bf16
        parameter.data = parameter.data.to(dtype)
    return model
