"""One decoder block, step by step as its program has it (`model/block.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.model.architecture import Architecture
from shardwise.model.numerics import Numerics
from shardwise.train.model.attention import attend
from shardwise.train.model.experts import Experts, Routing, route
from shardwise.train.model.functions import activate, collect, layer_norm, project, rms_norm
from shardwise.train.model.places import Rotation, rotate
from shardwise.train.model.weights import UnitModule


class NormedUnit(UnitModule):
    """A unit with norms of the architecture's kind."""

    def __init__(
        self, unit: str, architecture: Architecture, numerics: Numerics, without: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(unit, architecture, without)
        self.architecture, self.numerics = architecture, numerics

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, epsilon, offset = self.own(f"{name}.weight"), self.numerics.norm_epsilon, self.numerics.norm_offset
        if self.architecture.norm == "layer":
            return layer_norm(x, weight, self.if_any(f"{name}.bias"), epsilon, offset)
        y = rms_norm(x, weight, epsilon, offset)
        bias = self.if_any(f"{name}.bias")
        return y if bias is None else y + bias


class Block(NormedUnit):
    """A layer: hidden states [B, T, D] to hidden states, and what its router did where it has experts."""

    def __init__(self, architecture: Architecture, numerics: Numerics, layer: int) -> None:
        dense = layer < architecture.num_dense_layers
        shape = architecture.dense() if dense else architecture
        super().__init__("dense_block" if dense else "block", shape, numerics)
        if shape.num_experts:
            self.register_buffer("balance_bias", torch.zeros(shape.num_experts, dtype=torch.float32))

    def forward(self, x: Tensor, angles: Rotation | None, mask: Tensor | None) -> tuple[Tensor, Routing | None]:
        y = self.before(x, "attention_norm")
        attended = self.after(self.attention(y, angles, mask), "attention_post_norm")
        if self.architecture.parallel:
            z = self.before(x, "mlp_norm") if self.architecture.separate_norms else y
            fed, routing = self.feed_forward(z)
            return x + (attended + fed), routing
        middle = x + attended
        fed, routing = self.feed_forward(self.before(middle, "mlp_norm"))
        return middle + self.after(fed, "mlp_post_norm"), routing

    def before(self, x: Tensor, name: str) -> Tensor:
        return self.norm(x, name) if self.architecture.pre_norms else x

    def after(self, x: Tensor, name: str) -> Tensor:
        return self.norm(x, name) if self.architecture.post_norms else x

    def attention(self, y: Tensor, angles: Rotation | None, mask: Tensor | None) -> Tensor:
        q, k = (self.placed(self.normed(self.flat(y, name), name), angles) for name in ("q", "k"))
        v = project(y, self.own("wv"), self.if_any("v.bias"))
        return collect(attend(q, k, v, mask, self.numerics), self.own("wo"), self.if_any("attention_out.bias"))

    def flat(self, y: Tensor, name: str) -> Tensor:
        return project(y, self.own(f"w{name}"), self.if_any(f"{name}_flat.bias"))

    def normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.if_any(f"{name}_norm.weight")
        return x if weight is None else rms_norm(x, weight, self.numerics.norm_epsilon, self.numerics.norm_offset)

    def placed(self, x: Tensor, angles: Rotation | None) -> Tensor:
        return x if angles is None else rotate(x, angles)

    def feed_forward(self, y: Tensor) -> tuple[Tensor, Routing | None]:
        if not self.architecture.num_experts:
            return self.mlp(y), None
        routed, routing = self.experts(y)
        return (routed + self.shared(y) if self.architecture.shared_expert_width else routed), routing

    def mlp(self, y: Tensor) -> Tensor:
        act = self.activated(y, "w_gate", "w_up", "gate.bias", "up.bias")
        return collect(act, self.own("w_down"), self.if_any("mlp_out.bias"))

    def shared(self, y: Tensor) -> Tensor:
        out = collect(self.activated(y, "shared_gate", "shared_up", "", ""), self.own("shared_down"))
        weight = self.if_any("shared_expert_gate")
        return out if weight is None else out * torch.sigmoid(y @ weight)[..., None]

    def activated(self, y: Tensor, gate: str, up: str, gate_bias: str, up_bias: str) -> Tensor:
        gated, weight = None, self.if_any(gate)
        if weight is not None:
            gated = project(y, weight, self.if_any(gate_bias))
        return activate(self.architecture.mlp, gated, project(y, self.own(up), self.if_any(up_bias)))

    def experts(self, y: Tensor) -> tuple[Tensor, Routing]:
        """Each token through the experts that the router chooses."""
        rows = y.flatten(0, 1)
        logits, bias = rows @ self.own("router"), self.if_any("router_logits.bias")
        routing = route(
            logits if bias is None else logits + bias,
            self.architecture.experts_per_token,
            self.get_buffer("balance_bias"),
            normalised=self.numerics.normalised_gates,
        )
        biases = (self.if_any(f"experts_{part}.bias") for part in ("gate", "up", "down"))
        weights = self.if_any("experts_gate"), self.own("experts_up"), self.own("experts_down")
        return Experts(self.architecture.mlp, *weights, *biases)(rows, routing).view_as(y), routing
