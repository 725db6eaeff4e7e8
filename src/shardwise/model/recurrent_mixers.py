"""Mixers of a block beside attention: recurrences over the sequence, and a short convolution.

Each mixes the normalised hidden state [B, T, D] along the sequence and gives a sum that the residual stream takes:

- `gated_delta`: Gated DeltaNet (Yang et al. 2024; Qwen3-Next, Qwen3.5), with one decay for each head.
- `kimi_delta`: Kimi Delta Attention (Kimi Team 2025), with a decay for each row of a head's state, and gates of low rank.
- `lightning`: attention without a softmax, whose decays of each head are fixed (Qin et al. 2024; MiniMax-01).
- `mlstm`: matrix memory with exponential gates, divided by what the same gates make of the keys (Beck et al. 2024, xLSTM).
- `mamba2`: the state space model of Mamba-2 (Dao and Gu 2024; Nemotron-H, Granite 4, Falcon-H1, Bamba, Zamba2).
- `mamba1`: the state space model of Mamba (Gu and Dao 2023; Jamba), with a state of width N for each channel; each of several
  groups of channels has keys, queries and steps of its own (Zamba).
- `rg_lru`: the real-gated linear recurrent unit (De et al. 2024, Griffin; RecurrentGemma): a state for each channel, whose gates
  come from blocks of channels.
- `short_conv`: a gated short convolution (LFM2), without a state.

Dims: L heads of keys (`gated_delta`, `kimi_delta`, `lightning`, `mlstm`), groups of heads that share keys (`mamba2` with more
than one group), heads (`mamba2` with one group), channels (`mamba1`, `short_conv`) or blocks of channels (`rg_lru`), which
tensor parallelism splits (groups of O channels each of `mamba1` with groups); O heads of values for each of these; N and X
widths of a key and of a value, so that a state is N x X, or both that of a block; n is as wide as N; W taps of the convolution,
w the rows before; q the rank of gates and steps; c the tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, get_args

from shardwise.values import did_you_mean, raise_problems

RecurrentKind = Literal["gated_delta", "kimi_delta", "lightning", "mlstm", "mamba2", "mamba1", "rg_lru", "short_conv"]
OutputNorm = Literal["none", "before_gate", "after_gate"]
# How `transformers` keeps the projections of a delta rule as modules: Qwen3.5's way, with the gate in that of queries, keys and
# values (Qwen3-Next), or each in one of its own (OLMo-hybrid). Adapters of a module share their first matrix.
JoinedProjections = Literal["usual", "with_gate", "none"]
# The module of each projection, by kind. Source: the modelling code of Qwen3.5, Qwen3-Next, OLMo-hybrid, Kimi Linear and Ling 3,
# Bamba and Nemotron-H, Jamba, LFM2, RecurrentGemma, MiniMax-01 and xLSTM in transformers 5.23.
_SEPARATE: Mapping[str, str] = {f"w_{name}": f"{name}_proj" for name in ("q", "k", "v", "a", "b", "f", "g")}
MIXER_MODULES: Mapping[str, Mapping[str, str]] = {
    "gated_delta": {
        **dict.fromkeys(("w_q", "w_k", "w_v"), "in_proj_qkv"), "w_z": "in_proj_z", "w_a": "in_proj_a", "w_b": "in_proj_b",
        "w_out": "out_proj",
    },
    "gated_delta with_gate": {
        **dict.fromkeys(("w_q", "w_k", "w_v", "w_z"), "in_proj_qkvz"), **dict.fromkeys(("w_a", "w_b"), "in_proj_ba"),
        "w_out": "out_proj",
    },
    "gated_delta none": {**_SEPARATE, "w_z": "g_proj", "w_out": "o_proj"},
    "kimi_delta": {
        **_SEPARATE, "w_f_down": "f_a_proj", "w_f_up": "f_b_proj", "w_g_down": "g_a_proj", "w_g_up": "g_b_proj",
        "w_out": "o_proj",
    },
    "mamba2": {**dict.fromkeys(("w_x", "w_b", "w_c", "w_z", "w_dt"), "in_proj"), "w_out": "out_proj"},
    "mamba1": {
        **dict.fromkeys(("w_x", "w_z"), "in_proj"), **dict.fromkeys(("w_step_latent", "w_b", "w_c"), "x_proj"),
        "w_step": "dt_proj", "w_out": "out_proj",
    },
    "short_conv": {**dict.fromkeys(("w_gate_in", "w_gate_out", "w_x"), "in_proj"), "w_out": "out_proj"},
    "rg_lru": {"w_z": "linear_y", "w_x": "linear_x", "w_out": "linear_out"},
    "lightning": {**dict.fromkeys(("w_q", "w_k", "w_v"), "qkv_proj"), "w_z": "output_gate", "w_out": "out_proj"},
    "mlstm": {
        "w_q": "q", "w_k": "k", "w_v": "v", "w_z": "ogate_preact", "w_i": "igate_preact", "w_f": "fgate_preact",
        "w_out": "out_proj",
    },
}  # fmt: skip
IS_BEFORE_GATE: Mapping[OutputNorm, bool] = {"none": False, "before_gate": True, "after_gate": False}
IS_AFTER_GATE: Mapping[OutputNorm, bool] = {"none": False, "before_gate": False, "after_gate": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentStructure:
    """Structure of a mixer, without its sizes: all that a derivation reads.

    `has_groups`: heads come in several groups that share keys and queries. `norm`: RMSNorm of the outputs before or after their
    gate, of each head with a delta rule, of each group with `mamba2`. `step_norms`: RMSNorm of what steps are made of, of keys
    and of queries (`mamba1`). `conv_bias` and `projection_bias`: of the filters, and of the projections from and to the hidden
    state. `full_rank_gates`: gates of `kimi_delta` are products of the hidden state, in place of two of low rank.
    `bounded_decay`: its decays are sigmoids between one and a bound, in place of softplus. `joined`: which projections of a delta
    rule share a module, and so the first matrix of an adapter.
    """

    kind: RecurrentKind
    has_groups: bool = True
    norm: OutputNorm = "before_gate"
    step_norms: bool = False
    conv_bias: bool = False
    projection_bias: bool = False
    full_rank_gates: bool = False
    bounded_decay: bool = False
    joined: JoinedProjections = "usual"

    def __post_init__(self) -> None:
        allowed = {"kind": RecurrentKind, "norm": OutputNorm, "joined": JoinedProjections}
        raise_problems(
            [
                f"model: recurrent {name} is {value!r}{did_you_mean(value, get_args(kind))}; one of "
                f"{', '.join(get_args(kind))} is required"
                for name, kind in allowed.items()
                if (value := getattr(self, name)) not in get_args(kind)
            ]
        )

    @property
    def modules(self) -> Mapping[str, str]:
        """The module of each projection that may have an adapter, by the weight's name."""
        return MIXER_MODULES[self.kind if self.joined == "usual" else f"{self.kind} {self.joined}"]


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
    joined: JoinedProjections = "usual"

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
        if not problems and self.kind == "mamba1" and self.num_groups > 1 and self.step_norms:
            problems.append("model: step_norms are known for one group of channels; num_groups = 1 is required")
        if not problems and self.kind in ("kimi_delta", "lightning", "mlstm") and self.num_heads != self.num_groups:
            problems.append(
                f"model: {self.kind} has a key for each of num_heads = {self.num_heads} heads; num_groups = "
                f"{self.num_heads} is required, found {self.num_groups}"
            )
        if self.joined != "usual" and self.kind != "gated_delta":
            problems.append(
                f"model: joined = {self.joined} is about gated_delta; joined = usual is required, found {self.kind}"
            )
        raise_problems(problems)
        _ = self.structure  # raises for a kind or a norm that is not known

    @property
    def structure(self) -> RecurrentStructure:
        """The structure: all that derivations read of a mixer."""
        has_groups = self.kind == "gated_delta" or (self.kind in ("mamba1", "mamba2") and self.num_groups > 1)
        return RecurrentStructure(
            kind=self.kind, has_groups=has_groups, norm=self.norm, step_norms=self.step_norms, conv_bias=self.conv_bias,
            projection_bias=self.projection_bias, full_rank_gates=self.full_rank_gates, bounded_decay=self.bounded_decay,
            joined=self.joined,
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
    num_groups = 2 if structure.has_groups and structure.kind in ("mamba1", "mamba2") else 1
    return RecurrentMixer(
        kind=structure.kind, num_heads=num_groups, num_groups=num_groups, conv_width=2, norm=structure.norm,
        step_norms=structure.step_norms, conv_bias=structure.conv_bias, projection_bias=structure.projection_bias,
        full_rank_gates=structure.full_rank_gates, bounded_decay=structure.bounded_decay, joined=structure.joined,
    )  # fmt: skip
