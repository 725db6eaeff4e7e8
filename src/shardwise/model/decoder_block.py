"""One decoder block as operations on named tensors; its dims are those of `decoder.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwise.model.adapters import EXPERT_MODULES, MODULES_BY_WEIGHT
from shardwise.model.architecture import Architecture
from shardwise.model.indexer import IndexerBuilder
from shardwise.model.operations import Concatenate, Route, Scan
from shardwise.model.program import ModelPart, ProgramBuilder, Role
from shardwise.model.recurrent_mixers import add_recurrent_mixer
from shardwise.values import lookup

TOKENS = ("B", "T")
HIDDEN = (*TOKENS, "D")
# By kind of norm, its function and the sums that it reads.
NORM_FUNCTIONS: Mapping[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "rms": ("rms_norm", (("sum_square", "squares"),)),
    "layer": ("layer_norm", (("sum", "sum"), ("sum_square", "squares"))),
}
UNIT = "unit_"  # prefix of a norm's function without weights
# The projection that a weight belongs to: one of the names in `ModelStructure.bias`.
PROJECTIONS: Mapping[str, str] = {
    "wq": "qkv", "wk": "qkv", "wv": "qkv", "wo": "attention_out", "w_up": "mlp", "w_gate": "mlp", "w_down": "mlp",
}  # fmt: skip
RECEIVED, RETURNED = "received", "returned"  # tokens where their experts are, and results back where their tokens rest


class NormDims(NamedTuple):
    """Dims of a norm: those of its operand, those that it is taken over, and those of its weight."""

    operand: tuple[str, ...] = HIDDEN
    over: tuple[str, ...] = ("D",)
    weight: tuple[str, ...] = ("D",)


HIDDEN_NORM = NormDims()


def add_norm(
    builder: ProgramBuilder, architecture: Architecture, x: str, name: str, role: Role = Role.ACTIVATION,
    dims: NormDims = HIDDEN_NORM,
) -> str:  # fmt: skip
    """Add RMSNorm or LayerNorm; the sums are tensors of their own, so that the dims they are over may be sharded."""
    function, reductions = lookup(NORM_FUNCTIONS, architecture.norm, "norm")
    rows = tuple(dim for dim in dims.operand if dim not in dims.over)
    operands = [x]
    for reduction, suffix in reductions:
        operands.append(builder.elementwise(reduction, [x], f"{name}.{suffix}", rows, Role.STATISTIC))
    if not architecture.norm_weight:
        return builder.elementwise(UNIT + function, operands, f"{name}.out", dims.operand, role, dims.over)
    operands.append(builder.weight(f"{name}.weight", dims.weight, part=ModelPart.NORM))
    if not architecture.norm_bias:
        return builder.elementwise(function, operands, f"{name}.out", dims.operand, role, dims.over)
    scaled = builder.elementwise(function, operands, f"{name}.scaled", dims.operand, over=dims.over)
    bias = builder.weight(f"{name}.bias", dims.weight, part=ModelPart.NORM)
    return builder.elementwise("add_vector", [scaled, bias], f"{name}.out", dims.operand, role)


class BlockBuilder:
    """Writes one block's operations; `prefix` distinguishes the layers of a whole model.

    Parameters named x, y and z are tensor names: the block's input and normalised inputs. `projection` is one of the names in
    `ModelStructure.bias`, or of the matrices of experts. `adapter_inputs` are results of the first matrices of adapters, by
    module and what they read.
    """

    def __init__(self, builder: ProgramBuilder, architecture: Architecture, prefix: str) -> None:
        self.builder, self.architecture, self.prefix = builder, architecture, prefix
        # biases that a parallel block adds last: part, projection, name
        self.deferred_biases: list[tuple[ModelPart | None, str, str]] = []
        self.adapter_inputs: dict[tuple[str, str], str] = {}

    def build(self, x: str) -> str:
        if self.architecture.parallel:
            return self.parallel_branches(x)
        has_feed_forward = self.architecture.feed_forward != "none"
        if self.architecture.has_mixer:
            mixed = self.post_norm(self.mixer(self.pre_norm(x, "attention_norm")), "attention_post_norm")
            x = self.elementwise("add", [x, mixed], "x_mid" if has_feed_forward else "x_out", HIDDEN, Role.RESIDUAL)
        if not has_feed_forward:
            return x
        mlp = self.post_norm(self.feed_forward(self.pre_norm(x, "mlp_norm")), "mlp_post_norm")
        return self.elementwise("add", [x, mlp], "x_out", HIDDEN, Role.RESIDUAL)

    def parallel_branches(self, x: str) -> str:
        """Add mixer and MLP side by side, from one norm or from one each."""
        y = self.pre_norm(x, "attention_norm")
        mixed = self.post_norm(self.mixer(y), "attention_post_norm")
        z = self.pre_norm(x, "mlp_norm") if self.architecture.separate_norms else y
        branches = self.sum_parallel_branches(mixed, self.feed_forward(z))
        return self.elementwise("add", [x, branches], "x_out", HIDDEN, Role.RESIDUAL)

    def mixer(self, y: str) -> str:
        """Add what mixes the tokens of the layer: attention, a recurrence, or the sum of both."""
        recurrence = self.architecture.structure.recurrence
        if recurrence is None:
            return self.attention(y)
        recurrent = add_recurrent_mixer(self.builder, recurrence, y, f"{self.prefix}mixer.")
        if self.architecture.mixer == "none":
            return recurrent
        return self.elementwise("add", [self.attention(y), recurrent], "both_mixers", HIDDEN)

    def sum_parallel_branches(self, attended: str, mlp_out: str) -> str:
        """Add the results of a parallel block's branches, and then their biases, so that one sum is reduced and not two.

        Source: Black et al. 2022 (GPT-NeoX-20B), section 2.1: both are added on each device before a single all-reduce.
        """
        role = Role.RESIDUAL if self.deferred_biases else Role.ACTIVATION
        branches = self.elementwise("add", [attended, mlp_out], "both", HIDDEN, role)
        for part, projection, name in self.deferred_biases:
            with self.builder.in_part(part):
                branches = self.add_bias(branches, projection, name, "D", HIDDEN)
        return branches

    def attention(self, y: str) -> str:
        with self.builder.in_part(ModelPart.ATTENTION):
            return self.project_out(self.attended_values(y), "wo", (*self.value_dims, "D"), "attention_out")

    @property
    def value_dims(self) -> tuple[str, ...]:
        """Dims of a token's attended values."""
        return ("K", "G", "U" if self.architecture.structure.latent else "H")

    def attended_values(self, y: str) -> str:
        """Add attention up to what its last product reads."""
        q, k, v, *selected = self.latent_heads(y) if self.architecture.structure.latent else self.queries_and_keys(y)
        positions = self.builder.input("positions", "T", Role.CONSTANT)
        query_dims = (*TOKENS, *self.value_dims)
        outputs = (
            self.builder.tensor(f"{self.prefix}attended", query_dims, Role.ACTIVATION),
            self.builder.tensor(f"{self.prefix}lse", query_dims[:-1], Role.STATISTIC),
        )
        operands = (q, k, v, positions, positions, *self.sinks(), *selected)
        attended = self.builder.add(Scan(operands, outputs, is_sparse=bool(selected)))
        return self.inner_norm(self.gate_attention(attended, y), "attention_inner_norm", query_dims)

    def gate_attention(self, attended: str, y: str) -> str:
        """Add the sigmoid gate of each head or element of what attention gives, where there is one (Qiu et al. 2025)."""
        kind = self.architecture.attention_gate
        if kind == "none":
            return attended
        dims = self.value_dims if kind == "element" else self.value_dims[:-1]
        logits = self.contract(y, "w_attention_gate", (*dims, "D"), "attention_gate", (*TOKENS, *dims))
        return self.elementwise("sigmoid_gate", [attended, logits], "attended_gated", (*TOKENS, *self.value_dims))

    def sinks(self) -> tuple[str, ...]:
        return (self.builder.weight(f"{self.prefix}sinks", ("K", "G")),) if self.architecture.sinks else ()

    def queries_and_keys(self, y: str) -> tuple[str, ...]:
        """Add queries, keys and values, each from the hidden state."""
        query_dims, key_dims = (*TOKENS, "K", "G", "H"), (*TOKENS, "K", "H")
        q = self.rotary(self.qk_norm(self.project_heads(y, "q", query_dims), "q", query_dims), "q", query_dims)
        k = self.rotary(self.qk_norm(self.project_heads(y, "k", key_dims), "k", key_dims), "k", key_dims)
        return q, k, self.project_heads(y, "v", key_dims)

    def latent_heads(self, y: str) -> tuple[str, ...]:
        """Add queries, keys and values of latent attention, and the positions that an indexer selects, where there is one."""
        source, width = y, "D"
        if self.architecture.structure.latent_queries:
            down = self.contract(y, "w_q_down", ("Q", "D"), "q_latent", (*TOKENS, "Q"))
            source, width = self.latent_norm(down, "q_latent_norm", "Q"), "Q"
        heads = (self.latent_queries(source, width), *self.latent_keys(y))
        has_indexer = self.architecture.structure.indexer
        return (*heads, IndexerBuilder(self.builder, self.prefix).build(y, source)) if has_indexer else heads

    def latent_queries(self, source: str, width: str) -> str:
        """Add queries of latent attention: a non-rotary and a rotary part of each head, from a latent where there is one."""
        head_dims = (*TOKENS, "K", "G")
        plain = self.contract(source, "w_q_plain", ("K", "G", "I", width), "q_plain", (*head_dims, "I"))
        rotary = self.contract(source, "w_q_rotary", ("K", "G", "R", width), "q_rotary_flat", (*head_dims, "R"))
        return self.concatenate((plain, self.rotary(rotary, "q_rotary", (*head_dims, "R"))), "q", (*head_dims, "H"))

    def latent_keys(self, y: str) -> tuple[str, str]:
        """Add keys and values from one latent of each token; all heads share the keys' rotary part."""
        down = self.contract(y, "w_kv_down", ("C", "D"), "kv_latent", (*TOKENS, "C"))
        latent = self.latent_norm(down, "kv_latent_norm", "C")
        flat = self.contract(y, "w_k_rotary", ("R", "D"), "k_rotary_flat", (*TOKENS, "R"))
        plain = self.contract(latent, "w_k_up", ("K", "I", "C"), "k_plain", (*TOKENS, "K", "I"))
        k = self.concatenate((plain, self.rotary(flat, "k_rotary", (*TOKENS, "R"))), "k", (*TOKENS, "K", "H"))
        return k, self.contract(latent, "w_v_up", ("K", "U", "C"), "v", (*TOKENS, "K", "U"))

    def latent_norm(self, x: str, name: str, width: str) -> str:
        return self.sub_layer_norm(x, name, NormDims((*TOKENS, width), (width,), (width,)))

    def concatenate(self, parts: tuple[str, str], name: str, dims: tuple[str, ...]) -> str:
        """Concatenate the non-rotary and the rotary part of heads."""
        return self.builder.add(
            Concatenate(parts, (self.builder.tensor(f"{self.prefix}{name}", dims, Role.ACTIVATION),), ("I", "R"))
        )

    def mlp(self, y: str) -> str:
        hidden = (*TOKENS, "F")
        up = self.contract(y, "w_up", ("F", "D"), "up", hidden)
        inputs = [self.add_bias(up, "mlp", "up", "F", hidden)]
        if self.architecture.structure.has_gated_mlp:
            gate = self.contract(y, "w_gate", ("F", "D"), "gate", hidden)
            inputs.insert(0, self.add_bias(gate, "mlp", "gate", "F", hidden))
        act = self.elementwise(self.architecture.mlp, inputs, "act", hidden)
        act = self.inner_norm(act, "mlp_inner_norm", hidden)
        return self.project_out(act, "w_down", ("F", "D"), "mlp_out")

    def project_out(self, x: str, weight: str, weight_dims: Iterable[str], name: str) -> str:
        """Add a product back to D. Its sums are reduced where the residual stream rests before a bias is added to them."""
        projection = PROJECTIONS[weight]
        if projection in self.architecture.bias and self.architecture.parallel and not self.architecture.post_norms:
            self.deferred_biases.append((self.builder.part, projection, name))
            return self.contract(x, weight, weight_dims, name, HIDDEN)
        role = Role.RESIDUAL if projection in self.architecture.bias else Role.ACTIVATION
        out = self.contract(x, weight, weight_dims, name, HIDDEN, role)
        return self.add_bias(out, projection, name, "D", HIDDEN)

    def feed_forward(self, y: str) -> str:
        """Add the MLP, or the experts that the router chooses and the shared expert beside them."""
        with self.builder.in_part(ModelPart.MLP):
            if not self.architecture.structure.experts:
                return self.mlp(y)
            routed = self.experts(y)
            if not self.architecture.structure.shared_experts:
                return routed
            return self.elementwise("add", [routed, self.shared_expert(y)], "both_experts", HIDDEN)

    def experts(self, y: str) -> str:
        """Add dispatch, experts and combine; the AllToAlls follow from the resting specs of the routed rows."""
        width = "e" if self.architecture.structure.latent_experts else "D"
        dims, rows, hidden_dims = (*TOKENS, "E"), ("E", *TOKENS, width), ("E", *TOKENS, "M")
        logits = self.contract(y, "router", ("D", "E"), "router_logits", dims)
        logits = self.add_bias(logits, "router", "router_logits", "E", dims)
        gates = self.builder.add(Route((logits,), (self.builder.tensor(f"{self.prefix}gates", dims, Role.ACTIVATION),)))
        x = self.contract(y, "expert_latent_down", ("e", "D"), "expert_latent", (*TOKENS, "e")) if width == "e" else y
        dispatched = self.elementwise("dispatch", [x, gates], "dispatched", rows, Role.ROUTED)
        dispatched = self.elementwise("handover", [dispatched], RECEIVED, rows, Role.ROUTED)
        inputs = [self.expert_product(dispatched, "up", hidden_dims)]
        if self.architecture.structure.has_gated_mlp:
            inputs.insert(0, self.expert_product(dispatched, "gate", hidden_dims))
        act = self.elementwise(self.architecture.mlp, inputs, "experts_act", hidden_dims, Role.ROUTED)
        returned = self.elementwise("handover", [self.expert_product(act, "down", rows)], RETURNED, rows, Role.ROUTED)
        combined = self.elementwise("combine", [gates, returned], "combined", (*TOKENS, width))
        if width == "D":
            return combined
        return self.contract(combined, "expert_latent_up", ("D", "e"), "experts_out", HIDDEN)

    def expert_product(self, x: str, projection: str, dims: tuple[str, ...]) -> str:
        """Add a product of every expert, and its bias; sums that a bias is added to are reduced where the experts are."""
        width = "e" if self.architecture.structure.latent_experts else "D"
        bias_follows = "experts" in self.architecture.bias and dims[-1] == width
        name = f"experts_{projection}_{RECEIVED}" if bias_follows else f"experts_{projection}_out"
        out = self.contract(x, f"experts_{projection}", ("E", "M", width), name, dims, Role.ROUTED)
        return self.add_bias(out, "experts", f"experts_{projection}", ("E", dims[-1]), dims, Role.ROUTED)

    def shared_expert(self, y: str) -> str:
        """Add an expert that every token passes through, scaled by its gate if it has one."""
        hidden = (*TOKENS, "S")
        inputs = [self.contract(y, "shared_up", ("S", "D"), "shared_up_out", hidden)]
        if self.architecture.structure.has_gated_mlp:
            inputs.insert(0, self.contract(y, "shared_gate", ("S", "D"), "shared_gate_out", hidden))
        act = self.elementwise(self.architecture.mlp, inputs, "shared_act", hidden)
        if not self.architecture.shared_gate:
            return self.contract(act, "shared_down", ("S", "D"), "shared_out", HIDDEN)
        logit = self.contract(y, "shared_expert_gate", "D", "shared_logit", TOKENS)
        out = self.contract(act, "shared_down", ("S", "D"), "shared_out", HIDDEN, Role.RESIDUAL)
        return self.elementwise("sigmoid_gate", [out, logit], "shared_gated", HIDDEN)

    def project_heads(self, y: str, name: str, dims: tuple[str, ...]) -> str:
        """Add queries, keys or values as flat heads, before norms and rotation."""
        heads = dims[2:]
        target = f"{name}_flat" if name != "v" else name
        flat = self.contract(y, f"w{name}", (*heads, "D"), target, dims)
        return self.add_bias(flat, "qkv", target, heads, dims)

    def qk_norm(self, x: str, name: str, dims: tuple[str, ...]) -> str:
        if not self.architecture.qk_norm:
            return x
        heads = dims[2:]
        over, weight = lookup(
            {"head": (("H",), ("H",)), "each_head": (("H",), heads), "projection": (heads, heads)},
            self.architecture.qk_norm_over, "qk_norm_over",
        )  # fmt: skip
        return self.sub_layer_norm(x, f"{name}_norm", NormDims(dims, over, weight))

    def inner_norm(self, x: str, name: str, dims: tuple[str, ...]) -> str:
        """Add a norm of what a product back to D reads, over all of its input dims."""
        over = tuple(dim for dim in dims if dim not in TOKENS)
        return self.sub_layer_norm(x, name, NormDims(dims, over, over)) if self.architecture.inner_norms else x

    def sub_layer_norm(self, x: str, name: str, dims: NormDims) -> str:
        """Add a norm inside attention or the MLP, to which its results belong."""
        return add_norm(self.builder, self.architecture, x, f"{self.prefix}{name}", dims=dims)

    def rotary(self, x: str, name: str, dims: tuple[str, ...]) -> str:
        if not self.architecture.structure.has_rotary:
            return x
        positions = self.builder.input("positions", "T", Role.CONSTANT)
        return self.elementwise("rotary", [x, positions], name, dims)

    def add_bias(
        self,
        x: str,
        projection: str,
        name: str,
        bias: Iterable[str],
        dims: tuple[str, ...],
        role: Role = Role.ACTIVATION,
    ) -> str:
        """Return `x` plus its bias, where the structure has one."""
        if projection not in self.architecture.bias:
            return x
        vector = self.builder.weight(f"{self.prefix}{name}.bias", bias)
        return self.elementwise("add_vector", [x, vector], f"{name}_biased", dims, role)

    def pre_norm(self, x: str, name: str) -> str:
        return self.norm(x, name) if self.architecture.pre_norms else x

    def post_norm(self, x: str, name: str) -> str:
        return self.norm(x, name) if self.architecture.post_norms else x

    def norm(self, x: str, name: str) -> str:
        with self.builder.in_part(ModelPart.NORM):
            return add_norm(self.builder, self.architecture, x, f"{self.prefix}{name}")

    def elementwise(
        self, function: str, inputs: Iterable[str], name: str, dims: Iterable[str], role: Role = Role.ACTIVATION,
        over: tuple[str, ...] = ("D",),
    ) -> str:  # fmt: skip
        return self.builder.elementwise(function, inputs, f"{self.prefix}{name}", dims, role, over)

    def contract(
        self, x: str, weight: str, weight_dims: Iterable[str], name: str, dims: Iterable[str], role: Role = Role.ACTIVATION
    ) -> str:  # fmt: skip
        """Add a product and, where the structure has one, that of its low-rank adapter."""
        matrix = self.builder.weight(f"{self.prefix}{weight}", weight_dims)
        out = self.builder.contract(x, matrix, f"{self.prefix}{name}", dims, role)
        module = self.module_of(weight)
        if module not in self.architecture.structure.lora_targets:
            return out
        return self.add_adapter(out, x, (weight, module), tuple(weight_dims), name)

    def module_of(self, weight: str) -> str:
        """Return the module that a weight is a part of; without a latent of queries, both their parts are `q_proj`."""
        has_latent_queries = self.architecture.structure.latent_queries
        is_queries = weight in ("w_q_plain", "w_q_rotary") and not has_latent_queries
        return "q_proj" if is_queries else MODULES_BY_WEIGHT.get(weight, "")

    def add_adapter(
        self, out: str, x: str, adapted: tuple[str, str], weight_dims: tuple[str, ...], name: str
    ) -> str:  # fmt: skip
        """Add a low-rank adapter's product to that of its weight; `adapted` are this weight and its module.

        The adapter's hidden tensor rests as hidden states do: it is so narrow that moving it is cheaper than moving the
        operands. Weights of one module share it. Each expert has an adapter; that of gate and up has twice the rank.
        """
        weight, module = adapted
        tensor = self.builder.tensors[out]
        experts = ("E",) if tensor.role is Role.ROUTED else ()
        rank = "y" if module == EXPERT_MODULES[0] else "r"
        inputs = tuple(dim for dim in weight_dims if dim not in tensor.dims)
        outputs = tuple(dim for dim in weight_dims if dim in tensor.dims and dim not in experts)
        down, up = (f"{self.prefix}{weight}.lora_{matrix}" for matrix in ("a", "b"))
        if (module, x) not in self.adapter_inputs:
            a = self.builder.weight(down, (*experts, rank, *inputs), adapter=True)
            role = Role.ROUTED if experts else Role.RESIDUAL
            self.adapter_inputs[module, x] = self.builder.contract(x, a, f"{down}.out", (*experts, *TOKENS, rank), role)
        b = self.builder.weight(up, (*experts, rank, *outputs), adapter=True)
        role = Role.ROUTED if experts else Role.ACTIVATION
        adapter_out = self.builder.contract(self.adapter_inputs[module, x], b, f"{up}.out", tensor.dims, role)
        return self.elementwise("add", [out, adapter_out], f"{name}_adapted", tensor.dims, tensor.role)
