"""Programs of recurrent mixers: the operations of each kind; its dims are those of `recurrent_mixers.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from shardwise.model.operations import (
    SEGMENTS,
    Concatenate,
    Dims,
    Recurrence,
    SegmentEdge,
    SegmentState,
    ShortConvolution,
)
from shardwise.model.operations.recurrences import HAS_KEYS, UpdateRule
from shardwise.model.program import ModelPart, ProgramBuilder, Role
from shardwise.model.recurrent_mixers import IS_AFTER_GATE, IS_BEFORE_GATE, RecurrentKind, RecurrentStructure

TOKENS = ("B", "T")
HIDDEN = (*TOKENS, "D")


# Adds the adapter of a product, where there is one, and returns the sum: of the product, what it reads, its weight and the
# weight's dims.
Adapt = Callable[[str, str, str, Dims], str]


def _without_adapter(out: str, x: str, weight: str, weight_dims: Dims) -> str:
    return out


def add_recurrent_mixer(
    builder: ProgramBuilder, structure: RecurrentStructure, y: str, prefix: str, adapt: Adapt = _without_adapter
) -> str:
    """Add a mixer that reads `y` [B, T, D], and return the name of its result [B, T, D]. `adapt` adds adapters to products."""
    return MixerBuilder(builder, structure, prefix, adapt).build(y)


def state_dims(rule: UpdateRule, values: Dims) -> Dims:
    """Return the dims of a head's state behind those of its rows, for values of these dims."""
    heads = tuple(dim for dim in values if dim != "X")
    return (*heads, "N", *values[len(heads) :]) if HAS_KEYS[rule] else values


class MixerBuilder:
    """Writes one mixer's operations; names begin with `prefix`."""

    def __init__(
        self, builder: ProgramBuilder, structure: RecurrentStructure, prefix: str, adapt: Adapt = _without_adapter
    ) -> None:
        self.builder, self.structure, self.prefix, self.adapt = builder, structure, prefix, adapt

    def build(self, y: str) -> str:
        """Add the mixer of the structure, which reads `y` [B, T, D], and return the name of its result [B, T, D]."""
        mixers: Mapping[RecurrentKind, Callable[[str], str]] = {
            "gated_delta": self.gated_delta, "kimi_delta": self.kimi_delta, "mamba2": self.mamba2, "mamba1": self.mamba1,
            "short_conv": self.short_conv, "lightning": self.lightning,
            "mlstm": self.mlstm, "rg_lru": self.rg_lru,
        }  # fmt: skip
        with self.builder.in_part(ModelPart.RECURRENCE):
            return mixers[self.structure.kind](y)

    def gated_delta(self, y: str) -> str:
        keys, heads = ("L", "N"), ("L", "O")
        projected = [self.project(y, name, dims) for name, dims in (("q", keys), ("k", keys), ("v", (*heads, "X")))]
        gate, step, beta = (self.project(y, name, dims) for name, dims in (
            ("z", (*heads, "X")), ("a", heads), ("b", heads)
        ))  # fmt: skip
        q, k, v = self.convolve_all(projected, ("q", "k", "v"), (keys, keys, (*heads, "X")))
        decay = self.log_decay(self.step(step, heads), heads, heads)
        out = self.delta_rule(self.unit_rows(q, "q"), self.unit_rows(k, "k"), v, decay, self.write_strength(beta))
        return self.project_out(
            self.elementwise("swiglu", [gate, self.norm(out, ("X",), ("X",))], "gated", (*heads, "X"))
        )

    def kimi_delta(self, y: str) -> str:
        keys, values = ("L", "N"), ("L", "X")
        projected = [self.project(y, name, dims) for name, dims in (("q", keys), ("k", keys), ("v", values))]
        q, k, v = self.convolve_all(projected, ("q", "k", "v"), (keys, keys, values))
        decay = self.kimi_decay(self.gate_logits(y, "f", keys), keys)
        beta = self.write_strength(self.project(y, "b", ("L",)))
        out = self.delta_rule(self.unit_rows(q, "q"), self.unit_rows(k, "k"), v, decay, beta)
        normed = self.norm(out, ("X",), ("X",))
        gate = self.gate_logits(y, "g", values)
        return self.project_out(self.elementwise("sigmoid_gate", [normed, gate], "gated", values))

    def kimi_decay(self, x: str, keys: Dims) -> str:
        """Add the logarithms of decays: -exp(rate) softplus(x + bias), or a bound times sigmoid(exp(rate) (x + bias))."""
        if not self.structure.bounded_decay:
            return self.log_decay(self.step(x, keys), ("L",), keys)
        biased = self.elementwise("add_vector", [x, self.weight("step.bias", keys)], "step_biased", keys)
        rate = self.weight("log_rate", ("L",))
        return self.elementwise("bounded_decay", [biased, rate], "decay", keys, Role.STATISTIC)

    def lightning(self, y: str) -> str:
        keys, values = ("L", "N"), ("L", "X")
        q, k, v = (
            self.elementwise("silu", [self.project(y, name, dims)], f"{name}_act", dims)
            for name, dims in (("q", keys), ("k", keys), ("v", values))
        )
        decay = self.builder.input(f"{self.prefix}fixed_decay", (*TOKENS, "L"), Role.CONSTANT)
        normed = self.norm(self.recurrence("additive", (q, k, v, decay), values), values, values)
        return self.project_out(
            self.elementwise("sigmoid_gate", [normed, self.project(y, "z", values)], "gated", values)
        )

    def mlstm(self, y: str) -> str:
        keys, values = ("L", "N"), ("L", "X")
        q, k, v, gate = (
            self.project(y, name, dims) for name, dims in (("q", keys), ("k", keys), ("v", values), ("z", values))
        )
        write, forget = (self.biased_gate(y, name) for name in ("i", "f"))
        strength = self.elementwise("capped_exp", [write], "strength", ("L",), Role.STATISTIC)
        decay = self.elementwise("capped_log_sigmoid", [forget], "decay", ("L",), Role.STATISTIC)
        written = self.elementwise("multiply", [v, strength], "v_written", values)
        read = self.recurrence("additive", (q, k, written, decay), values, scales_queries=True)
        total = self.recurrence("additive", (q, k, strength, decay), ("L",), name="total_", scales_queries=True)
        out = self.elementwise("bounded_divide", [read, total], "divided", values)
        return self.project_out(self.elementwise("sigmoid_gate", [self.layer_norm(out), gate], "gated", values))

    def biased_gate(self, y: str, name: str) -> str:
        logits, bias = self.project(y, name, ("L",)), self.weight(f"{name}.bias", ("L",))
        return self.elementwise("add_vector", [logits, bias], f"{name}_biased", ("L",))

    def layer_norm(self, x: str) -> str:
        """Add LayerNorm of each head, whose weights differ from head to head."""
        dims = self.builder.tensors[x].dims[2:]
        sums = [
            self.elementwise(function, [x], f"norm.{name}", dims[:-1], Role.STATISTIC)
            for function, name in (("sum", "sum"), ("sum_square", "squares"))
        ]
        weight = self.builder.weight(f"{self.prefix}norm.weight", dims, part=ModelPart.NORM)
        return self.elementwise("layer_norm", [x, *sums, weight], "norm.out", dims, over=dims[-1:])

    def mamba2(self, y: str) -> str:
        groups: Dims = ("L",) if self.structure.has_groups else ()
        heads: Dims = ("L", "O") if self.structure.has_groups else ("L",)
        keys, values = (*groups, "N"), (*heads, "X")
        streams = (("x", values), ("b", keys), ("c", keys))
        projected = [self.project(y, name, dims) for name, dims in streams]
        gate, step = self.project(y, "z", values), self.project(y, "dt", heads)
        x, k, q = self.convolve_all(projected, ("x", "b", "c"), (values, keys, keys))
        step = self.step(step, heads)
        scaled = self.elementwise("multiply", [x, step], "v", values)
        scanned = self.recurrence("additive", (q, k, scaled, self.log_decay(step, heads, heads)), values)
        skipped = self.elementwise("multiply", [x, self.weight("skip", heads)], "skipped", values)
        out = self.elementwise("add", [scanned, skipped], "mixed", values)
        return self.project_out(self.gated_norm(out, gate, values))

    def gated_norm(self, out: str, gate: str, values: Dims) -> str:
        """Add the gate of the outputs, and their norm over each group of heads before or after it, where there is one."""
        over = values[len(values) - 2 :]
        if IS_BEFORE_GATE[self.structure.norm]:
            out = self.norm(out, over, values)
        out = self.elementwise("swiglu", [gate, out], "gated", values)
        return self.norm(out, over, values) if IS_AFTER_GATE[self.structure.norm] else out

    def mamba1(self, y: str) -> str:
        channels: Dims = ("L", "O") if self.structure.has_groups else ("L",)
        projected, gate = self.project(y, "x", channels), self.project(y, "z", channels)
        (x,) = self.convolve_all([projected], ("x",), (channels,))
        latent, k, q = (
            self.narrow_projection(x, name, width) for name, width in (("step_latent", "q"), ("b", "N"), ("c", "N"))
        )
        flat = self.product(latent, "w_step", (*channels, "q"), "step_flat", channels)
        step = self.step(flat, channels)
        scaled = self.elementwise("multiply", [x, step], "v", channels)
        scanned = self.recurrence(
            "additive", (q, k, scaled, step), channels, rates=self.weight("log_rate", (*channels, "N"))
        )
        skipped = self.elementwise("multiply", [x, self.weight("skip", channels)], "skipped", channels)
        out = self.elementwise("add", [scanned, skipped], "mixed", channels)
        return self.project_out(self.elementwise("swiglu", [gate, out], "gated", channels))

    def narrow_projection(self, x: str, name: str, width: str) -> str:
        """Add a projection of all channels, or of those of each group, to a few, and its norm, where the structure has one."""
        if self.structure.has_groups:
            return self.product(x, f"w_{name}", ("L", width, "O"), name, ("L", width))
        out = self.product(x, f"w_{name}", (width, "L"), name, (width,))
        return self.norm(out, (width,), (width,), f"{name}_norm") if self.structure.step_norms else out

    def short_conv(self, y: str) -> str:
        channels = ("L",)
        before, after, x = (self.project(y, name, channels) for name in ("gate_in", "gate_out", "x"))
        gated = self.elementwise("multiply", [before, x], "gated_in", channels)
        (convolved,) = self.convolve_all([gated], ("x",), (channels,), activation=False)
        return self.project_out(self.elementwise("multiply", [after, convolved], "gated", channels))

    def rg_lru(self, y: str) -> str:
        channels, columns = ("L", "X"), ("L", "N")  # N is X, as the rows that a block's gates read
        gate, projected = (self.project(y, name, dims) for name, dims in (("z", channels), ("x", columns)))
        (flat,) = self.convolve_all([projected], ("x",), (columns,), activation=False)
        write, forget = (self.block_gate(flat, name, channels) for name in ("i", "r"))
        x = self.builder.add(Concatenate((flat,), (self.tensor("x_block", (*TOKENS, *channels)),), ("N",)))
        decay = self.elementwise(
            "gated_decay", [forget, self.weight("log_rate", channels)], "decay", channels, Role.STATISTIC
        )
        gated = self.elementwise("sigmoid_gate", [x, write], "x_gated", channels)
        written = self.elementwise("normalised_write", [gated, decay, self.builder.positions()], "v", channels)
        scanned = self.recurrence("elementwise", (written, decay), channels)
        return self.project_out(self.elementwise("geglu", [gate, scanned], "gated", channels))

    def block_gate(self, x: str, name: str, channels: Dims) -> str:
        """Add the logits of a gate: a product of each block of channels with its own matrix, and a bias."""
        matrix = self.weight(f"w_{name}", (*channels, "N"))
        logits = self.builder.contract(x, matrix, f"{self.prefix}{name}", (*TOKENS, *channels))
        return self.elementwise(
            "add_vector", [logits, self.weight(f"{name}.bias", channels)], f"{name}_biased", channels
        )

    def delta_rule(self, q: str, k: str, v: str, decay: str, beta: str) -> str:
        return self.recurrence("delta", (q, k, v, decay, beta), self.builder.tensors[v].dims[2:])

    def recurrence(
        self, rule: UpdateRule, operands: tuple[str, ...], values: Dims, *, rates: str | None = None, name: str = "",
        scales_queries: bool = False,
    ) -> str:  # fmt: skip
        """Add what each segment of the sequence makes of a state, and the recurrence that starts from the segments before.

        `rates` are those by which steps, the last operand, decay the rows of a state.
        """
        heads = tuple(dim for dim in values if dim != "X")
        decay = (*heads, "N") if rates else self.builder.tensors[operands[3 if HAS_KEYS[rule] else 1]].dims[2:]
        rows = ("B", SEGMENTS)
        transition = (*rows, *heads, "N", "n") if rule == "delta" else (*rows, *decay)
        segments = (
            self.tensor(f"{name}state", (*rows, *state_dims(rule, values)), Role.STATISTIC),
            self.tensor(f"{name}transition", transition, Role.STATISTIC),
        )
        operands = (*operands, *([rates] if rates else []))
        without_queries = operands[1:] if HAS_KEYS[rule] else operands
        self.builder.add(SegmentState(without_queries, segments, rule, has_rates=bool(rates)))
        out = self.tensor(f"{name}scanned", (*TOKENS, *values))
        return self.builder.add(
            Recurrence(
                (*operands, *segments),
                (out,),
                rule,
                has_rates=bool(rates),
                scales_queries=scales_queries or rule == "delta",
            )
        )

    def convolve_all(
        self, streams: Iterable[str], names: tuple[str, ...], channels: tuple[Dims, ...], *, activation: bool = True
    ) -> tuple[str, ...]:
        """Add short convolutions of several streams; the last rows of all are taken first, so that they can leave together."""
        inputs = tuple(streams)
        edges = [
            self.builder.add(SegmentEdge((x,), (self.tensor(f"{name}_edge", ("B", SEGMENTS, "w", *dims)),)))
            for x, name, dims in zip(inputs, names, channels, strict=True)
        ]
        return tuple(
            self.convolve(x, edge, name, dims, activation=activation)
            for x, edge, name, dims in zip(inputs, edges, names, channels, strict=True)
        )

    def convolve(self, x: str, edge: str, name: str, channels: Dims, *, activation: bool) -> str:
        result = self.convolution(x, self.weight(f"{name}_conv", ("W", *channels)), edge, name)
        if self.structure.conv_bias:
            bias = self.weight(f"{name}_conv.bias", channels)
            result = self.elementwise("add_vector", [result, bias], f"{name}_convolved_biased", channels)
        return self.elementwise("silu", [result], f"{name}_act", channels) if activation else result

    def convolution(self, x: str, filters: str, edge: str, name: str) -> str:
        """Add a convolution that reads the last rows of the segment before."""
        out = self.tensor(f"{name}_convolved", self.builder.tensors[x].dims)
        return self.builder.add(ShortConvolution((x, filters, edge), (out,)))

    def step(self, x: str, dims: Dims) -> str:
        """Add the steps of a state space model: softplus(x + bias)."""
        biased = self.elementwise("add_vector", [x, self.weight("step.bias", dims)], "step_biased", dims)
        return self.elementwise("softplus", [biased], "step", dims, Role.STATISTIC)

    def log_decay(self, step: str, rates: Dims, dims: Dims) -> str:
        return self.elementwise("log_decay", [step, self.weight("log_rate", rates)], "decay", dims, Role.STATISTIC)

    def write_strength(self, logit: str) -> str:
        return self.elementwise("sigmoid", [logit], "beta", self.builder.tensors[logit].dims[2:], Role.STATISTIC)

    def unit_rows(self, x: str, name: str) -> str:
        """Add queries or keys divided by their length."""
        *heads, width = self.builder.tensors[x].dims[2:]
        squares = self.elementwise("sum_square", [x], f"{name}_squares", tuple(heads), Role.STATISTIC)
        return self.elementwise("l2_norm", [x, squares], f"{name}_unit", (*heads, width))

    def gate_logits(self, y: str, name: str, dims: Dims) -> str:
        return self.project(y, name, dims) if self.structure.full_rank_gates else self.low_rank_gate(y, name, dims)

    def low_rank_gate(self, y: str, name: str, dims: Dims) -> str:
        down = self.product(y, f"w_{name}_down", ("q", "D"), f"{name}_latent", ("q",))
        return self.product(down, f"w_{name}_up", (*dims, "q"), name, dims)

    def norm(self, x: str, over: Dims, weight_dims: Dims, name: str = "norm") -> str:
        """Add RMSNorm over the last dims of a tensor."""
        dims = self.builder.tensors[x].dims[2:]
        rows = tuple(dim for dim in dims if dim not in over)
        squares = self.elementwise("sum_square", [x], f"{name}.squares", rows, Role.STATISTIC)
        weight = self.builder.weight(f"{self.prefix}{name}.weight", weight_dims, part=ModelPart.NORM)
        return self.elementwise("rms_norm", [x, squares, weight], f"{name}.out", dims, over=over)

    def project(self, y: str, name: str, dims: Dims) -> str:
        """Add a projection of the hidden state, and its bias, where the structure has one."""
        out = self.product(y, f"w_{name}", (*dims, "D"), name, dims)
        if not self.structure.projection_bias:
            return out
        return self.elementwise("add_vector", [out, self.weight(f"{name}.bias", dims)], f"{name}_biased", dims)

    def project_out(self, x: str) -> str:
        """Add the projection back to D. Its sums are reduced where the residual stream rests before a bias is added to them."""
        dims = self.builder.tensors[x].dims[2:]
        role = Role.RESIDUAL if self.structure.projection_bias else Role.ACTIVATION
        out = self.product(x, "w_out", (*dims, "D"), "out", ("D",), role)
        if not self.structure.projection_bias:
            return out
        return self.elementwise("add_vector", [out, self.weight("out.bias", ("D",))], "out_biased", ("D",))

    def product(
        self, x: str, weight: str, weight_dims: Dims, name: str, dims: Dims, role: Role = Role.ACTIVATION
    ) -> str:  # fmt: skip
        """Add a product with a matrix, and that of its adapter, where there is one."""
        out = self.builder.contract(x, self.weight(weight, weight_dims), f"{self.prefix}{name}", (*TOKENS, *dims), role)
        return self.adapt(out, x, weight, weight_dims)

    def weight(self, name: str, dims: Dims) -> str:
        return self.builder.weight(f"{self.prefix}{name}", dims)

    def tensor(self, name: str, dims: Dims, role: Role = Role.ACTIVATION) -> str:
        return self.builder.tensor(f"{self.prefix}{name}", dims, role)

    def elementwise(
        self, function: str, inputs: Iterable[str], name: str, dims: Dims, role: Role = Role.ACTIVATION, over: Dims = ("D",)
    ) -> str:  # fmt: skip
        return self.builder.elementwise(function, inputs, f"{self.prefix}{name}", (*TOKENS, *dims), role, over)
