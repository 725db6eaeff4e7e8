"""All parallelism choices of a job, as one value: `Layout`; and variants of context parallelism.

Its text form is what people write, "tp=8 pp=4 fsdp=16 recompute=selective": KEY=VALUE words, and natural values for the rest. A
variant says how attention reads the parts of a sequence that other ranks along `cp` hold, in one table that derivation, legality,
costs and searches read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from shardwise.layout.placement import Placement
from shardwise.model.recompute_policies import policy_problem
from shardwise.pipeline import natural_schedule, schedule_names
from shardwise.pipeline.registry import ALL_SCHEDULES
from shardwise.values import InputError, did_you_mean, lookup, parse_count, parse_like, raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelVariant:
    """A variant of context parallelism.

    `structure`: the variant that the derivation knows. Which positions a rank holds makes no difference there, so both rings
    are one. `sequence_pieces`: pieces of the sequence that a rank takes: two, one from either end, so that causal work is
    even, or one. `is_ring`: keys and values are passed around instead of being gathered. `exchanges_heads`: attention swaps
    its sharding of the sequence for one of heads. `waits_for_last`: the rank with the last piece has the most scores, and the
    others wait for it.
    """

    structure: str
    sequence_pieces: int = 2
    is_ring: bool = False
    exchanges_heads: bool = False
    waits_for_last: bool = False


# The first is the default of a layout.
CP_VARIANTS: dict[str, ContextParallelVariant] = {
    "all_gather": ContextParallelVariant(structure="all_gather"),
    "zigzag": ContextParallelVariant(structure="ring", is_ring=True),
    "ulysses": ContextParallelVariant(structure="ulysses", exchanges_heads=True),
    "ring": ContextParallelVariant(structure="ring", is_ring=True, sequence_pieces=1, waits_for_last=True),
}


def cp_variant_names() -> tuple[str, ...]:
    """Return the names that a layout may use."""
    return tuple(CP_VARIANTS)


def get_cp_variant(name: str) -> ContextParallelVariant:
    """Return a variant by name. Raises `InputError` that lists the names."""
    return lookup(CP_VARIANTS, name, "cp_variant")


Offload = Literal["none", "optimizer", "activations", "both"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "activations", "both")


class OffloadTargets(NamedTuple):
    """State kept in host memory: `optimizer`, moments and master weights; `activations`, those saved for the backward pass."""

    optimizer: bool
    activations: bool


OFFLOAD_TARGETS: Mapping[str, OffloadTargets] = {
    "none": OffloadTargets(optimizer=False, activations=False),
    "optimizer": OffloadTargets(optimizer=True, activations=False),
    "activations": OffloadTargets(optimizer=False, activations=True),
    "both": OffloadTargets(optimizer=True, activations=True),
}
UNPRICED_SCHEDULE_HINT = " ({}: {}; `shardwise schedule` plays it)"
AXES = ("dp", "fsdp", "tp", "cp", "pp", "ep")


def get_offload_targets(offload: str) -> OffloadTargets:
    """Return what a choice of offload keeps in host memory. Raises `InputError` that lists the names."""
    return lookup(OFFLOAD_TARGETS, offload, "offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The degrees of the mesh axes, and the choices that go with them.

    `dp` replicates; `fsdp` (with `cp`) is the axis over which ZeRO shards. `ep` splits experts over devices that otherwise hold
    different sequences, and `etp` splits each expert as tensor parallelism splits a layer: by default over `tp`, or 1 for whole
    experts, and then `tp` is a part of `ep`. `sequence_parallel` splits the activations between the matrix products over `tp`
    along the sequence. `cp_variant` is how attention reads the other parts of a sequence: keys and values gathered
    (`all_gather`), passed around a ring (`zigzag`: each rank has a piece from either end, so that causal work is even; `ring`:
    consecutive pieces), or heads exchanged for the sequence (`ulysses`). `async_tp` runs the collectives of tensor parallelism in
    pieces, overlapped with matmuls. `recompute` is a policy or a set of tensors of `model/recompute_policies.py`, for the first
    `recompute_layers` layers of each stage (None: all; the virtual stages of a device count as one), `schedule` is one of
    `pipeline/registry.py`. `offload` says what is kept in host memory. `layers_per_stage` is given where stages are not to be as
    even as possible.
    `placement` says which links each axis runs over.

    Raises `InputError` with every value that no layout has. Whether a model and a cluster allow the layout is checked when it is
    priced. `Layout.parse` fills in natural values; the constructor does not.

    >>> layout = Layout(fsdp=8, tp=2, zero_stage=3, sequence_parallel=True)
    >>> layout.num_devices, layout.num_replicas
    (16, 8)
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    num_virtual_stages: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    cp_variant: str = "all_gather"
    async_tp: bool = False
    micro_batch_seqs: int = 1
    recompute: str = "none"
    recompute_layers: int | None = None
    offload: Offload = "none"
    schedule: str = "none"
    layers_per_stage: tuple[int, ...] | None = None
    placement: Placement | None = None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of a text of KEY=VALUE words, whose keys are field names; `str` of a layout is such a text.

        Fields that are left out take natural values: ZeRO-3 where fsdp > 1, sequence parallelism where tp > 1, the natural
        schedule for the stages. A placement is written AXES@LEVELS, axes from the innermost, then levels of the network.
        Raises `InputError` for unknown words, and for values that no layout has.

        >>> layout = Layout.parse("tp=8 pp=4 fsdp=16 recompute=selective")
        >>> layout.num_devices, layout.zero_stage, layout.sequence_parallel, layout.schedule
        (512, 3, True, '1f1b')
        >>> Layout.parse(str(layout)) == layout
        True
        >>> layout
        Layout.parse('fsdp=16 tp=8 pp=4 zero_stage=3 sequence_parallel=true micro_batch_seqs=1 recompute=selective')
        """

        return layout_from_fields(parse_fields(text))

    def __post_init__(self) -> None:
        counts: tuple[str, ...] = (*AXES, "num_virtual_stages", "micro_batch_seqs")
        counts += ("recompute_layers",) if self.recompute_layers is not None else ()
        problems = [
            f"layout: {name} is {getattr(self, name)!r}; a whole number of at least 1 is required"
            for name in counts
            if not isinstance(getattr(self, name), int)
            or isinstance(getattr(self, name), bool)
            or getattr(self, name) < 1
        ]
        problems += [problem] if (problem := policy_problem(self.recompute)) else []
        choices = {
            "zero_stage": (0, 1, 2, 3),
            "schedule": schedule_names(),
            "cp_variant": cp_variant_names(),
            "offload": OFFLOADS,
        }
        problems += [
            f"layout: {name} is {value!r}{did_you_mean(value, allowed)}; one of {', '.join(map(str, allowed))} is required"
            + (
                UNPRICED_SCHEDULE_HINT.format(value, ALL_SCHEDULES[value].unpriced_reason)
                if name == "schedule" and value in ALL_SCHEDULES
                else ""
            )
            for name, allowed in choices.items()
            if (value := getattr(self, name)) not in allowed
        ]
        if not problems and self.etp not in (None, 1, self.tp):
            problems.append(f"layout: etp is {self.etp!r}; 1 for whole experts, or tp = {self.tp}, is required")
        layers = self.layers_per_stage
        if layers is not None and (not layers or any(type(count) is not int or count < 0 for count in layers)):
            problems.append(f"layout: layers_per_stage is {layers!r}; whole numbers of at least 0 are required")
        raise_problems(problems)

    @property
    def expert_tp(self) -> int:
        """Degree by which each expert is split: `etp`, or `tp` where that is None."""
        return self.tp if self.etp is None else self.etp

    @property
    def num_devices(self) -> int:
        """Devices of the layout: dp · fsdp · tp · cp · pp; `ep` is a part of these."""
        return self.dp * self.fsdp * self.tp * self.cp * self.pp

    @property
    def offloads_optimizer(self) -> bool:
        """True if moments and master weights are kept in host memory."""
        return get_offload_targets(self.offload).optimizer

    @property
    def offloads_activations(self) -> bool:
        """True if activations saved for the backward pass are kept in host memory."""
        return get_offload_targets(self.offload).activations

    @property
    def num_replicas(self) -> int:
        """Groups of devices that process different sequences: dp · fsdp."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        parts = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        if self.num_virtual_stages > 1:
            parts.append(f"num_virtual_stages={self.num_virtual_stages}")
        if self.zero_stage or self.fsdp > 1:
            parts.append(f"zero_stage={self.zero_stage}")
        if self.sequence_parallel or self.tp > 1:
            parts.append(f"sequence_parallel={str(self.sequence_parallel).lower()}")
        if self.cp > 1 or self.cp_variant != cp_variant_names()[0]:
            parts.append(f"cp_variant={self.cp_variant}")
        if self.expert_tp != self.tp:
            parts.append(f"etp={self.expert_tp}")
        if self.async_tp:
            parts.append("async_tp=true")
        if self.schedule != natural_schedule(self.pp, self.num_virtual_stages):
            parts.append(f"schedule={self.schedule}")
        if self.layers_per_stage:
            parts.append(f"layers_per_stage={','.join(map(str, self.layers_per_stage))}")
        parts += [f"micro_batch_seqs={self.micro_batch_seqs}", f"recompute={self.recompute}"]
        if self.recompute_layers is not None:
            parts.append(f"recompute_layers={self.recompute_layers}")
        if self.offload != "none":
            parts.append(f"offload={self.offload}")
        return " ".join(parts)

    def __repr__(self) -> str:
        text = f"{self} placement={self.placement}" if self.placement else str(self)
        return f"Layout.parse({text!r})"


DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Layout)}
NONE_WORDS: Mapping[str, str] = {"etp": "none", "recompute_layers": "all"}  # how None is written
# What others call a field: Megatron-LM's and torchtitan's options, and their usual abbreviations.
ALIASES: Mapping[str, str] = {
    "vpp": "num_virtual_stages", "vp": "num_virtual_stages", "mbs": "micro_batch_seqs", "micro_batch_size": "micro_batch_seqs",
    "sp": "sequence_parallel", "zero": "zero_stage", "dp_shard": "fsdp", "dp_replicate": "dp",
    "activation_checkpoint": "recompute",
}  # fmt: skip


def parse_fields(text: str, *, prefix: str = "layout", extra_counts: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a layout's fields by name, and whole numbers for the names in `extra_counts`.

    Raises `InputError`, which begins with `prefix`, for a word that is no KEY=VALUE, a key that is unknown or given twice, and a
    value of another kind.
    """
    field_values: dict[str, Any] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        known_names = (*DEFAULTS, *extra_counts)
        if not equals or key not in known_names:
            hint = f" (did you mean {ALIASES[key]!r}?)" if key in ALIASES else did_you_mean(key, known_names)
            raise InputError(
                f"{prefix}: found {word!r}{hint}; KEY=VALUE with a key of {', '.join(known_names)} is required"
            )
        if key in field_values:
            raise InputError(f"{prefix}: {key} is given twice")
        field_values[key] = _parse_value(key, value, prefix)
    return field_values


def layout_from_fields(field_values: Mapping[str, Any]) -> Layout:
    """Return the layout with these fields; fields that are left out take natural values, as in `Layout.parse`.

    Raises `InputError` for values that no layout has.
    """
    fsdp, tp, pp = (field_values.get(axis, 1) for axis in ("fsdp", "tp", "pp"))
    natural = {
        "zero_stage": 3 if fsdp > 1 else 0, "sequence_parallel": tp > 1,
        "schedule": natural_schedule(pp, field_values.get("num_virtual_stages", 1)),
    }  # fmt: skip
    return Layout(**{**natural, **field_values})


def _parse_value(key: str, text: str, prefix: str) -> Any:
    label = f"{prefix}: {key}"
    if text.lower() == NONE_WORDS.get(key):
        return None
    if key == "placement":
        return _parse_placement(text, label)
    if key == "layers_per_stage":
        return tuple(parse_count(part, label=label, minimum=0) for part in text.strip("[]").split(","))
    return parse_count(text, label=label) if key in NONE_WORDS else parse_like(text, DEFAULTS.get(key, 1), label)


def _parse_placement(text: str, label: str) -> Placement:
    axes, separator, levels = text.partition("@")
    if not separator or not all(level.isdecimal() for level in levels.split(",")):
        raise InputError(f"{label}: found {text!r}; AXES@LEVELS is required, such as tp,cp,fsdp,dp,pp@0,1")
    return Placement(axes=tuple(axes.split(",")), levels=tuple(int(level) for level in levels.split(",")))
