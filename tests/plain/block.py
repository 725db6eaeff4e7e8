"""One decoder block, step by step as its program has it (`model/decoder_block.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from plain.attention import attend
from plain.experts import Experts, Routing, route
from plain.functions import activate, collect, layer_norm, project, rms_norm, spread
from plain.latent import latent_heads
from plain.places import Rotation, rotate
from plain.weights import UnitModule
from shardwise.model.architecture import Architecture
from shardwise.model.numerics import Numerics

Result = tuple[Tensor, Routing | None]


class NormedUnit(UnitModule):
    """A unit with norms of the architecture's kind."""

    def __init__(
        self, unit: str, architecture: Architecture, numerics: Numerics, without: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(unit, architecture, without)
        self.architecture, self.numerics = architecture, numerics

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, epsilon, offset = (
            self.parameter(f"{name}.weight"),
            self.numerics.norm_epsilon,
            self.numerics.norm_offset,
        )
        if self.architecture.norm == "layer":
            return layer_norm(x, weight, self.optional_parameter(f"{name}.bias"), epsilon, offset)
        y = rms_norm(x, weight, epsilon, offset)
        bias = self.optional_parameter(f"{name}.bias")
        return y if bias is None else y + bias


class Block(NormedUnit):
    """A layer: hidden states [B, T, D] to hidden states, and what its router did where it has experts.

    `capacity`: the factor by which experts take more than an even share, of each of so many parts of the sequences.
    """

    capacity: tuple[float, int] | None = None

    def __init__(self, architecture: Architecture, numerics: Numerics, layer: int) -> None:
        unit = architecture.layer_units[layer]
        super().__init__(unit, architecture.unit_architecture(unit), numerics)
        self.keep_balanced()

    def keep_balanced(self) -> None:
        """Have a bias of the router's choice, where there is one."""
        if self.architecture.num_experts:
            self.register_buffer("balance_bias", torch.zeros(self.architecture.num_experts, dtype=torch.float32))

    def forward(self, x: Tensor, angles: Rotation | None, mask: Tensor | None) -> Result:
        if "none" in (self.architecture.mixer, self.architecture.feed_forward):
            return self.single(x, angles, mask)
        y = self.before(x, "attention_norm")
        attended = self.after(self.attention(y, angles, mask), "attention_post_norm")
        if self.architecture.parallel:
            z = self.before(x, "mlp_norm") if self.architecture.separate_norms else y
            fed, routing = self.feed_forward(z)
            return x + (attended + fed), routing
        middle = x + attended
        fed, routing = self.feed_forward(self.before(middle, "mlp_norm"))
        return middle + self.after(fed, "mlp_post_norm"), routing

    def single(self, x: Tensor, angles: Rotation | None, mask: Tensor | None) -> Result:
        """Attention or an MLP alone."""
        if self.architecture.feed_forward == "none":
            attended = self.attention(self.before(x, "attention_norm"), angles, mask)
            return x + self.after(attended, "attention_post_norm"), None
        fed, routing = self.feed_forward(self.before(x, "mlp_norm"))
        return x + self.after(fed, "mlp_post_norm"), routing

    def before(self, x: Tensor, name: str) -> Tensor:
        return self.norm(x, name) if self.architecture.pre_norms else x

    def after(self, x: Tensor, name: str) -> Tensor:
        return self.norm(x, name) if self.architecture.post_norms else x

    def attention(self, y: Tensor, angles: Rotation | None, mask: Tensor | None) -> Tensor:
        latent = self.architecture.kv_lora_rank
        q, k, v = latent_heads(self, y, angles, self.numerics) if latent else self.heads(y, angles)
        attended = attend(q, k, v, mask, self.numerics, self.optional_parameter("sinks"))
        return self.collected(attended, "wo", "attention_out.bias")

    def heads(self, y: Tensor, angles: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each from the hidden state."""
        flat = (self.projected(y, f"w{name}", f"{name}_flat.bias") for name in ("q", "k"))
        q, k = (self.normed(x, name) for x, name in zip(flat, ("q", "k"), strict=True))
        v = self.projected(y, "wv", "v.bias")
        return (q, k, v) if angles is None else (rotate(q, angles), rotate(k, angles), v)

    def normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.optional_parameter(f"{name}_norm.weight")
        return x if weight is None else rms_norm(x, weight, self.numerics.norm_epsilon, self.numerics.norm_offset)

    def feed_forward(self, y: Tensor) -> tuple[Tensor, Routing | None]:
        if not self.architecture.num_experts:
            return self.mlp(y), None
        routed, routing = self.experts(y)
        return (routed + self.shared(y) if self.architecture.shared_expert_width else routed), routing

    def mlp(self, y: Tensor) -> Tensor:
        act = self.activated(y, "w_gate", "w_up", "gate.bias", "up.bias")
        return self.collected(act, "w_down", "mlp_out.bias")

    def shared(self, y: Tensor) -> Tensor:
        out = self.collected(self.activated(y, "shared_gate", "shared_up", "", ""), "shared_down", "")
        weight = self.optional_parameter("shared_expert_gate")
        return out if weight is None else out * torch.sigmoid(y @ weight)[..., None]

    def activated(self, y: Tensor, gate: str, up: str, gate_bias: str, up_bias: str) -> Tensor:
        gated = self.projected(y, gate, gate_bias) if self.architecture.structure.has_gated_mlp else None
        return activate(self.architecture.mlp, gated, self.projected(y, up, up_bias))

    def projected(self, x: Tensor, weight: str, bias: str) -> Tensor:
        """x by a weight [*out, D], with its bias and its low-rank adapter where it has them."""
        out = project(x, self.parameter(weight), self.optional_parameter(bias))
        down = self.optional_parameter(f"{weight}.lora_a")
        return out if down is None else out + spread(project(x, down), self.parameter(f"{weight}.lora_b"))

    def collected(self, x: Tensor, weight: str, bias: str) -> Tensor:
        """x [B, T, *in] by a weight [*in, D], likewise."""
        out = collect(x, self.parameter(weight), self.optional_parameter(bias))
        down = self.optional_parameter(f"{weight}.lora_a")
        return (
            out
            if down is None
            else out + spread(x.flatten(2) @ down.flatten(1).t(), self.parameter(f"{weight}.lora_b"))
        )

    def experts(self, y: Tensor) -> tuple[Tensor, Routing]:
        """Each token through the experts that the router chooses."""
        rows = y.flatten(0, 1)
        logits, bias = rows @ self.parameter("router"), self.optional_parameter("router_logits.bias")
        routing = route(
            logits if bias is None else logits + bias,
            self.architecture.experts_per_token,
            self.get_buffer("balance_bias"),
            normalised=self.numerics.normalised_gates,
            gating=self.numerics.gating,
            capacity=self.capacity,
        )
        biases = (self.optional_parameter(f"experts_{part}.bias") for part in ("gate", "up", "down"))
        weights = self.optional_parameter("experts_gate"), self.parameter("experts_up"), self.parameter("experts_down")
        return Experts(self.architecture.mlp, *weights, *biases)(rows, routing).view_as(y), routing
