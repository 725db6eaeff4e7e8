"""Building blocks of a decoder block: products with their adapters and biases, norms, rotations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwise.model.adapters import ADAPTER_INPUT, ADAPTER_OUTPUT, EXPERT_MODULES, MODULES_BY_WEIGHT
from shardwise.model.architecture import Architecture
from shardwise.model.program import ModelPart, ProgramBuilder, Role
from shardwise.model.shared_blocks import ADAPTED_WEIGHTS
from shardwise.model.structure import HAS_NORM
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


class NormDims(NamedTuple):
    """Dims of a norm: those of its operand, those that it is taken over, and those of its weight (None: it has none)."""

    operand: tuple[str, ...] = HIDDEN
    over: tuple[str, ...] = ("D",)
    weight: tuple[str, ...] | None = ("D",)


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
    if not architecture.norm_weight or dims.weight is None:
        return builder.elementwise(UNIT + function, operands, f"{name}.out", dims.operand, role, dims.over)
    operands.append(builder.weight(f"{name}.weight", dims.weight, part=ModelPart.NORM))
    if not architecture.norm_bias:
        return builder.elementwise(function, operands, f"{name}.out", dims.operand, role, dims.over)
    scaled = builder.elementwise(function, operands, f"{name}.scaled", dims.operand, over=dims.over)
    bias = builder.weight(f"{name}.bias", dims.weight, part=ModelPart.NORM)
    return builder.elementwise("add_vector", [scaled, bias], f"{name}.out", dims.operand, role)


class BlockPartBuilder:
    """Writes one block's operations; `prefix` distinguishes the layers of a whole model.

    Parameters named x, y and z are tensor names: the block's input and normalised inputs. `projection` is one of the names in
    `ModelStructure.bias`, or of the matrices of experts. `adapter_inputs` are results of the first matrices of adapters, by
    module and what they read.
    """

    def __init__(self, builder: ProgramBuilder, architecture: Architecture, prefix: str) -> None:
        self.builder, self.architecture, self.prefix = builder, architecture, prefix
        # biases that a parallel block adds last: part, projection, name
        self.deferred_biases: list[tuple[ModelPart | None, str, str]] = []
        self.gate_source: tuple[str, str] | None = (
            None  # what attention's gate reads, with its dim, if not the hidden state
        )
        self.adapter_inputs: dict[tuple[str, str], str] = {}
        self.carried: Mapping[
            str, str
        ] = {}  # tensors that the layer reads beside the residual stream, by its inputs' names
        self.handed_on: list[str] = []  # tensors that later layers read
        self.shared_prefix = prefix  # of the weights of a shared block, where a program has the layer that owns them

    def read_carried(self, name: str, dims: Iterable[str]) -> str:
        """Return the name of a tensor that the layer reads beside the residual stream: an input, in a unit's program."""
        return self.carried.get(name) or self.builder.input(name, dims, Role.CARRIED)

    def project_out(self, x: str, weight: str, weight_dims: Iterable[str], name: str) -> str:
        """Add a product back to D. Its sums are reduced where the residual stream rests before a bias is added to them."""
        projection = PROJECTIONS[weight]
        if projection in self.architecture.bias and self.architecture.parallel and not self.architecture.post_norms:
            self.deferred_biases.append((self.builder.part, projection, name))
            return self.contract(x, weight, weight_dims, name, HIDDEN)
        role = Role.RESIDUAL if projection in self.architecture.bias else Role.ACTIVATION
        out = self.contract(x, weight, weight_dims, name, HIDDEN, role)
        return self.add_bias(out, projection, name, "D", HIDDEN)

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
        positions = self.builder.positions()
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

    def pre_norm(self, x: str, name: str, half: str = "feed_forward") -> str:
        """Add a norm of what a half of the block reads, where the structure has one."""
        has_norm = self.architecture.pre_norms and HAS_NORM[self.architecture.pre_norms_over, half]
        if not has_norm:
            return x
        y = self.norm(x, name)
        is_gated = self.architecture.structure.norm_gates and HAS_NORM[self.architecture.norm_gates_over, half]
        return self.gate_norm(y, name) if is_gated else y

    def gate_norm(self, y: str, name: str) -> str:
        """Add the gate of a norm's result: the sigmoid of a narrow MLP of it."""
        with self.builder.in_part(ModelPart.NORM):
            down = self.contract(y, f"{name}.gate_down", ("h", "D"), f"{name}.gate_hidden", (*TOKENS, "h"))
            act = self.elementwise("silu", [down], f"{name}.gate_act", (*TOKENS, "h"))
            logits = self.contract(act, f"{name}.gate_up", ("D", "h"), f"{name}.gate_logits", HIDDEN)
            return self.elementwise("sigmoid_gate", [y, logits], f"{name}.gated", HIDDEN)

    def stream_norm(self, x: str, name: str) -> str:
        """Add a norm of the residual stream, which rests as that does."""
        with self.builder.in_part(ModelPart.NORM):
            return add_norm(self.builder, self.architecture, x, f"{self.prefix}{name}", Role.RESIDUAL)

    def post_norm(self, x: str, name: str, half: str = "feed_forward") -> str:
        """Add a norm of what a half of the block adds to the residual stream, where the structure has one."""
        has_norm = self.architecture.post_norms and HAS_NORM[self.architecture.post_norms_over, half]
        return self.norm(x, name) if has_norm else x

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
        if module in self.architecture.structure.lora_targets:
            return self.add_adapter(out, x, (weight, module), tuple(weight_dims), name)
        adapted = ADAPTED_WEIGHTS[self.architecture.adapted_parts]
        if weight not in adapted:
            return out
        with self.builder.borrowing(""):  # each layer has its own
            return self.add_adapter(out, x, (weight, adapted[weight]), tuple(weight_dims), name)

    def module_of(self, weight: str) -> str:
        """Return the module that a weight is a part of; without a latent of queries, both their parts are `q_proj`."""
        if weight == "w_attention_gate":
            return self.architecture.attention_gate_module
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
        down, up = (f"{self.prefix}{weight}{ending}" for ending in (ADAPTER_INPUT, ADAPTER_OUTPUT))
        if (module, x) not in self.adapter_inputs:
            a = self.builder.weight(down, (*experts, rank, *inputs), adapter=True)
            role = Role.ROUTED if experts else Role.RESIDUAL
            self.adapter_inputs[module, x] = self.builder.contract(x, a, f"{down}.out", (*experts, *TOKENS, rank), role)
        b = self.builder.weight(up, (*experts, rank, *outputs), adapter=True)
        role = Role.ROUTED if experts else Role.ACTIVATION
        adapter_out = self.builder.contract(self.adapter_inputs[module, x], b, f"{up}.out", tensor.dims, role)
        return self.elementwise("add", [out, adapter_out], f"{name}_adapted", tensor.dims, tensor.role)
