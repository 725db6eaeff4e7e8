"""Mixers of a block beside attention: recurrences over the sequence, and a short convolution.

Each mixes the normalised hidden state [B, T, D] along the sequence and gives a sum that the residual stream takes:

- `gated_delta`: Gated DeltaNet (Yang et al. 2024; Qwen3-Next, Qwen3.5), with one decay for each head.
- `kimi_delta`: Kimi Delta Attention (Kimi Team 2025), with a decay for each row of a head's state, and gates of low rank.
- `lightning`: attention without a softmax, whose decays of each head are fixed (Qin et al. 2024; MiniMax-01).
- `mlstm`: matrix memory with exponential gates, divided by what the same gates make of the keys (Beck et al. 2024, xLSTM).
- `mamba2`: the state space model of Mamba-2 (Dao and Gu 2024; Nemotron-H, Granite 4, Falcon-H1, Bamba, Zamba2).
- `mamba1`: the state space model of Mamba (Gu and Dao 2023; Jamba), with a state of width N for each channel.
- `short_conv`: a gated short convolution (LFM2), without a state.

Dims: L heads of keys (`gated_delta`, `kimi_delta`, `lightning`, `mlstm`), groups of heads that share keys (`mamba2` with more
than one group), heads (`mamba2` with one group) or channels (`mamba1`, `short_conv`), which tensor parallelism splits; O heads
of values for each of these; N and X widths of a key and of a value, so that a state is N x X; n is as wide as N; W taps of the
convolution, w the rows before; q the rank of gates and steps; c the tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, get_args

from shardwise.model.operations import SEGMENTS, Dims, Recurrence, SegmentEdge, SegmentState, ShortConvolution
from shardwise.model.operations.recurrences import UpdateRule
from shardwise.model.program import ModelPart, ProgramBuilder, Role
from shardwise.values import did_you_mean, raise_problems

RecurrentKind = Literal["gated_delta", "kimi_delta", "lightning", "mlstm", "mamba2", "mamba1", "short_conv"]
OutputNorm = Literal["none", "before_gate", "after_gate"]
IS_BEFORE_GATE: Mapping[OutputNorm, bool] = {"none": False, "before_gate": True, "after_gate": False}
IS_AFTER_GATE: Mapping[OutputNorm, bool] = {"none": False, "before_gate": False, "after_gate": True}
TOKENS = ("B", "T")
HIDDEN = (*TOKENS, "D")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentStructure:
    """Structure of a mixer, without its sizes: all that a derivation reads.

    `has_groups`: heads come in several groups that share keys and queries. `norm`: RMSNorm of the outputs before or after their
    gate, of each head with a delta rule, of each group with `mamba2`. `step_norms`: RMSNorm of what steps are made of, of keys
    and of queries (`mamba1`). `conv_bias` and `projection_bias`: of the filters, and of the projections from and to the hidden
    state. `full_rank_gates`: gates of `kimi_delta` are products of the hidden state, in place of two of low rank.
    `bounded_decay`: its decays are sigmoids between one and a bound, in place of softplus.
    """

    kind: RecurrentKind
    has_groups: bool = True
    norm: OutputNorm = "before_gate"
    step_norms: bool = False
    conv_bias: bool = False
    projection_bias: bool = False
    full_rank_gates: bool = False
    bounded_decay: bool = False

    def __post_init__(self) -> None:
        allowed = {"kind": RecurrentKind, "norm": OutputNorm}
        raise_problems(
            [
                f"model: recurrent {name} is {value!r}{did_you_mean(value, get_args(kind))}; one of "
                f"{', '.join(get_args(kind))} is required"
                for name, kind in allowed.items()
                if (value := getattr(self, name)) not in get_args(kind)
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentMixer:
    """Sizes and structure of a mixer.

    `num_heads` are those of values (channels of `mamba1` and `short_conv`), `num_groups` those of keys, each of which serves as
    many heads of values. `key_dim` is the width of a key, which is the rows of a state, `head_dim` that of a value. `gate_rank`
    is that of the gates of `kimi_delta` and of the steps of `mamba1`, `chunk` the tokens within which products take the place of
    the recurrence. Raises `InputError` with every size that is wrong.

    >>> mixer = RecurrentMixer(
    ...     kind="gated_delta", num_heads=32, num_groups=16, key_dim=128, head_dim=128, conv_width=4, chunk=64
    ... )
    >>> mixer.dims["L"], mixer.dims["O"], mixer.structure.has_groups
    (16, 2, True)
    """

    kind: RecurrentKind
    num_heads: int
    conv_width: int
    num_groups: int = 1
    key_dim: int = 1
    head_dim: int = 1
    gate_rank: int = 1
    chunk: int = 64
    norm: OutputNorm = "before_gate"
    step_norms: bool = False
    conv_bias: bool = False
    projection_bias: bool = False
    full_rank_gates: bool = False
    bounded_decay: bool = False

    def __post_init__(self) -> None:
        names = ("num_heads", "num_groups", "key_dim", "head_dim", "conv_width", "gate_rank", "chunk")
        problems = [
            f"model: recurrent {name} is {value!r}; a whole number of at least 1 is required"
            for name in names
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool) or value < 1
        ]
        if not problems and self.num_heads % self.num_groups:
            problems.append(
                f"model: recurrent num_heads = {self.num_heads} is not a multiple of num_groups = {self.num_groups}"
            )
        if not problems and self.kind in ("kimi_delta", "lightning", "mlstm") and self.num_heads != self.num_groups:
            problems.append(
                f"model: {self.kind} has a key for each of num_heads = {self.num_heads} heads; num_groups = "
                f"{self.num_heads} is required, found {self.num_groups}"
            )
        raise_problems(problems)
        _ = self.structure  # raises for a kind or a norm that is not known

    @property
    def structure(self) -> RecurrentStructure:
        """The structure: all that derivations read of a mixer."""
        has_groups = self.kind == "gated_delta" or (self.kind == "mamba2" and self.num_groups > 1)
        return RecurrentStructure(
            kind=self.kind, has_groups=has_groups, norm=self.norm, step_norms=self.step_norms, conv_bias=self.conv_bias,
            projection_bias=self.projection_bias, full_rank_gates=self.full_rank_gates, bounded_decay=self.bounded_decay,
        )  # fmt: skip

    @property
    def dims(self) -> Mapping[str, int]:
        """Sizes of the mixer's dims, by letter."""
        per_group = self.num_heads // self.num_groups if self.structure.has_groups else 1
        return {
            "L": self.num_heads // per_group,
            "O": per_group,
            "N": self.key_dim,
            "n": self.key_dim,
            "X": self.head_dim,
            "W": self.conv_width,
            "w": self.conv_width - 1,
            "q": self.gate_rank,
            "c": self.chunk,
        }


def parse_recurrence(fields: Mapping[str, Any]) -> RecurrentMixer:
    """Return the mixer with these fields by name. Raises `InputError` for a field that it lacks, or that is missing.

    >>> parse_recurrence({"kind": "short_conv", "num_heads": 2048, "conv_width": 3}).dims["L"]
    2048
    """
    names = [field.name for field in dataclass_fields(RecurrentMixer)]
    required = [field.name for field in dataclass_fields(RecurrentMixer) if field.default is MISSING]
    problems = [
        f"model: recurrence has {name!r}{did_you_mean(name, names)}; one of {', '.join(names)} is required"
        for name in fields
        if name not in names
    ]
    problems += [f"model: recurrence has no {name}; it is required" for name in required if name not in fields]
    raise_problems(problems)
    return RecurrentMixer(**fields)


def placeholder_mixer(structure: RecurrentStructure) -> RecurrentMixer:
    """Return a mixer of this structure with placeholder sizes, which derivations do not read."""
    num_groups = 2 if structure.has_groups and structure.kind == "mamba2" else 1
    return RecurrentMixer(
        kind=structure.kind, num_heads=num_groups, num_groups=num_groups, conv_width=2, norm=structure.norm,
        step_norms=structure.step_norms, conv_bias=structure.conv_bias, projection_bias=structure.projection_bias,
        full_rank_gates=structure.full_rank_gates, bounded_decay=structure.bounded_decay,
    )  # fmt: skip


def add_recurrent_mixer(builder: ProgramBuilder, structure: RecurrentStructure, y: str, prefix: str) -> str:
    """Add a mixer that reads `y` [B, T, D], and return the name of its result [B, T, D]."""
    return MixerBuilder(builder, structure, prefix).build(y)


class MixerBuilder:
    """Writes one mixer's operations; names begin with `prefix`."""

    def __init__(self, builder: ProgramBuilder, structure: RecurrentStructure, prefix: str) -> None:
        self.builder, self.structure, self.prefix = builder, structure, prefix

    def build(self, y: str) -> str:
        """Add the mixer of the structure, which reads `y` [B, T, D], and return the name of its result [B, T, D]."""
        mixers: Mapping[RecurrentKind, Callable[[str], str]] = {
            "gated_delta": self.gated_delta, "kimi_delta": self.kimi_delta, "mamba2": self.mamba2, "mamba1": self.mamba1,
            "short_conv": self.short_conv, "lightning": self.lightning,
            "mlstm": self.mlstm,
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
        channels = ("L",)
        projected, gate = self.project(y, "x", channels), self.project(y, "z", channels)
        (x,) = self.convolve_all([projected], ("x",), (channels,))
        latent, k, q = (
            self.narrow_projection(x, name, width) for name, width in (("step_latent", "q"), ("b", "N"), ("c", "N"))
        )
        flat = self.builder.contract(
            latent, self.weight("w_step", ("L", "q")), f"{self.prefix}step_flat", (*TOKENS, "L")
        )
        step = self.step(flat, channels)
        scaled = self.elementwise("multiply", [x, step], "v", channels)
        scanned = self.recurrence("additive", (q, k, scaled, step), channels, rates=self.weight("log_rate", ("L", "N")))
        skipped = self.elementwise("multiply", [x, self.weight("skip", channels)], "skipped", channels)
        out = self.elementwise("add", [scanned, skipped], "mixed", channels)
        return self.project_out(self.elementwise("swiglu", [gate, out], "gated", channels))

    def narrow_projection(self, x: str, name: str, width: str) -> str:
        """Add a projection of all channels to a few, and its norm, where the structure has one."""
        out = self.builder.contract(x, self.weight(f"w_{name}", (width, "L")), f"{self.prefix}{name}", (*TOKENS, width))
        return self.norm(out, (width,), (width,), f"{name}_norm") if self.structure.step_norms else out

    def short_conv(self, y: str) -> str:
        channels = ("L",)
        before, after, x = (self.project(y, name, channels) for name in ("gate_in", "gate_out", "x"))
        gated = self.elementwise("multiply", [before, x], "gated_in", channels)
        (convolved,) = self.convolve_all([gated], ("x",), (channels,), activation=False)
        return self.project_out(self.elementwise("multiply", [after, convolved], "gated", channels))

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
        decay = (*heads, "N") if rates else self.builder.tensors[operands[3]].dims[2:]
        rows, width = ("B", SEGMENTS), values[len(heads) :]
        transition = (*rows, *heads, "N", "n") if rule == "delta" else (*rows, *decay)
        segments = (
            self.tensor(f"{name}state", (*rows, *heads, "N", *width), Role.STATISTIC),
            self.tensor(f"{name}transition", transition, Role.STATISTIC),
        )
        operands = (*operands, *([rates] if rates else []))
        self.builder.add(SegmentState(operands[1:], segments, rule, has_rates=bool(rates)))
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
        down = self.builder.contract(
            y, self.weight(f"w_{name}_down", ("q", "D")), f"{self.prefix}{name}_latent", (*TOKENS, "q")
        )
        return self.builder.contract(
            down, self.weight(f"w_{name}_up", (*dims, "q")), f"{self.prefix}{name}", (*TOKENS, *dims)
        )

    def norm(self, x: str, over: Dims, weight_dims: Dims, name: str = "norm") -> str:
        """Add RMSNorm over the last dims of a tensor."""
        dims = self.builder.tensors[x].dims[2:]
        rows = tuple(dim for dim in dims if dim not in over)
        squares = self.elementwise("sum_square", [x], f"{name}.squares", rows, Role.STATISTIC)
        weight = self.builder.weight(f"{self.prefix}{name}.weight", weight_dims, part=ModelPart.NORM)
        return self.elementwise("rms_norm", [x, squares, weight], f"{name}.out", dims, over=over)

    def project(self, y: str, name: str, dims: Dims) -> str:
        """Add a projection of the hidden state, and its bias, where the structure has one."""
        weight = self.weight(f"w_{name}", (*dims, "D"))
        out = self.builder.contract(y, weight, f"{self.prefix}{name}", (*TOKENS, *dims))
        if not self.structure.projection_bias:
            return out
        return self.elementwise("add_vector", [out, self.weight(f"{name}.bias", dims)], f"{name}_biased", dims)

    def project_out(self, x: str) -> str:
        """Add the projection back to D. Its sums are reduced where the residual stream rests before a bias is added to them."""
        dims = self.builder.tensors[x].dims[2:]
        role = Role.RESIDUAL if self.structure.projection_bias else Role.ACTIVATION
        out = self.builder.contract(x, self.weight("w_out", (*dims, "D")), f"{self.prefix}out", HIDDEN, role)
        if not self.structure.projection_bias:
            return out
        return self.elementwise("add_vector", [out, self.weight("out.bias", ("D",))], "out_biased", ("D",))

    def weight(self, name: str, dims: Dims) -> str:
        return self.builder.weight(f"{self.prefix}{name}", dims)

    def tensor(self, name: str, dims: Dims, role: Role = Role.ACTIVATION) -> str:
        return self.builder.tensor(f"{self.prefix}{name}", dims, role)

    def elementwise(
        self, function: str, inputs: Iterable[str], name: str, dims: Dims, role: Role = Role.ACTIVATION, over: Dims = ("D",)
    ) -> str:  # fmt: skip
        return self.builder.elementwise(function, inputs, f"{self.prefix}{name}", (*TOKENS, *dims), role, over)
