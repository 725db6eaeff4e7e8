"""Software stacks by name: their kinds, what each supports, and its defaults.

`catalog/stacks.toml` lists the stacks and what they can run; the rules of `layout.rules.stack_abilities` apply it. An unknown
stack is assumed to be like others of its kind.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal, NamedTuple

from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.hardware.chips import Chip
from shardwise.values import BUCKET_BYTES, InputError, IssuePolicy, did_you_mean
from shardwise.values.engine_policies import Casts, RouterWeights, WeightCasts, WholeGradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Layouts and jobs that a stack can run.

    `axes`: those of tp, cp, pp and ep that it has; `zero`: stages of ZeRO beside plain replicas, `zero_with_pp` those that
    work in a pipeline. `zero_with_cp` and `zero_with_ep`: those that work with such an axis, over which some also shard
    weights; they contain 0 if plain replicas do. `schedules` of pipelines, `cp_variants`, policies of `recompute`, kinds of
    loss (`losses`), formats of matmuls (`products`) beside those of 16 and 32 bits, and what it can `offload`, are names of
    their tables. `precisions`: recipes that it has with ZeRO; `replica_precisions`: those with plain replicas.
    `uneven_stages`: a pipeline's stages may have different numbers of layers; `stages`: how it deals layers out to them;
    `uneven_batches`: replicas may have different numbers of sequences; `whole_experts`: experts may be whole where tp
    splits layers (`etp=1`). `rules`: combinations that it requires (`layout.rules.framework_rules`). `source`: where that is
    written.
    """

    axes: tuple[str, ...]
    zero: tuple[int, ...]
    zero_with_pp: tuple[int, ...]
    zero_with_cp: tuple[int, ...]
    zero_with_ep: tuple[int, ...]
    schedules: tuple[str, ...]
    cp_variants: tuple[str, ...]
    recompute: tuple[str, ...]
    losses: tuple[str, ...]
    products: tuple[str, ...]
    precisions: tuple[str, ...]
    replica_precisions: tuple[str, ...]
    offload: tuple[str, ...]
    stages: tuple[str, ...]
    rules: tuple[str, ...]
    sequence_parallel: bool
    async_tp: bool
    uneven_stages: bool
    uneven_batches: bool
    whole_experts: bool
    source: str

    def items(self) -> list[tuple[str, Any]]:
        """Return each ability by name, without the source."""
        return [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "source"]


def read_abilities(table: Mapping[str, Mapping[str, Any]], name: str) -> Abilities:
    """Return the abilities of a stack: its own lines, and for the rest those of the stack that it is `as`.

    Without a statement a stack combines all its stages of ZeRO with any axis, supports whole experts, has no rules, deals layers
    out by their cost unless its stages are alike, and has the same recipes with and without ZeRO.
    """
    runs: Any = {}
    ancestor: str | None = name
    while ancestor is not None:
        runs = {**table[ancestor].get("runs", {}), **runs}
        ancestor = table[ancestor].get("as")
    all_stages = sorted({0, *runs["zero"]})
    usual = {
        "zero_with_cp": all_stages,
        "zero_with_ep": all_stages,
        "whole_experts": True,
        "uneven_batches": True,
        "rules": [],
    }
    usual["stages"] = ["balanced", "even", "equal"] if runs["uneven_stages"] else ["equal"]
    runs = {**usual, "replica_precisions": runs["precisions"], **runs}
    values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in runs.items()}
    return Abilities(**values)


def union_abilities(stacks: Iterable[Abilities], source: str) -> Abilities:
    """Return what at least one of several stacks supports; of their rules those that all have."""
    all_stacks = list(stacks)
    union: dict[str, Any] = {}
    for name, first in all_stacks[0].items():
        values = [getattr(abilities, name) for abilities in all_stacks]
        union[name] = (
            any(values)
            if isinstance(first, bool)
            else tuple(dict.fromkeys(ability for supported in values for ability in supported))
        )
    union["rules"] = tuple(rule for rule in union["rules"] if all(rule in abilities.rules for abilities in all_stacks))
    return Abilities(**union, source=source)


CATALOG: Traversable = resources.files("shardwise.hardware").joinpath("catalog")


class StackKind(NamedTuple):
    """Kind of software stacks: what is assumed of a stack whose entry does not say.

    `priors`: those of constants before the stack is measured, where they differ from `CONSTANTS`. `loss`: the leanest
    cross-entropy (`values.engine_policies.LOSS_KERNELS`). `bucket_bytes`: bytes of gradients that are reduced at once if they are
    not sharded. `host_s`: seconds of the host per counted kernel, where it launches each. `platforms`: chips of a stack that is
    known by its kind alone.
    """

    priors: Mapping[str, float]
    loss: str
    bucket_bytes: float
    host_s: float
    platforms: tuple[str, ...] = ("GPU",)


# Priors: eager PyTorch runs each operation as a kernel, and the attention kernels of 2023 were slower; Megatron and Transformer
# Engine fuse by hand; XLA and torch.compile fuse adjacent operations. Source: geometric means of what published runs fit of the
# stacks of each kind, rounded, each with the root of its number of runs as weight; of compiled stacks with that number, as one
# has most runs; current eager stacks have too few.
# Loss: PyTorch's own; Megatron-Core, --cross-entropy-loss-fusion; XLA and torch.compile fuse the loss into kernels that read
# logits once.
# Buckets: PyTorch's DistributedDataParallel, bucket_cap_mb; Megatron-Core, DistributedDataParallelConfig.bucket_size: 40 million
# parameters, here in fp32; XLA reduces the stacked gradients of a scan over layers as one array, which is more than any unit has.
# Host: small models under Megatron-LM of 2022 take 3.3 to 3.6 ms for a layer of some 40 kernels, forward and backward, however
# short these are. Of 70, 80, ... 110 microseconds the one of least squared error over the first half of
# calibrate/published_runs/layouts.csv; published runs of other stacks of these kinds do not contradict it. XLA and torch.compile
# launch far less.
STACK_KINDS: Mapping[str, StackKind] = {
    "eager_2023": StackKind({"elementwise": 3.4, "attention": 1.8, "launch_s": 30e-6}, "unfused", BUCKET_BYTES, 100e-6),
    "eager": StackKind({"elementwise": 3.0, "attention": 1.0}, "unfused", BUCKET_BYTES, 100e-6),
    "fused": StackKind({"elementwise": 1.6, "attention": 0.7, "launch_s": 16e-6}, "fused", 160e6, 100e-6),
    "compiled": StackKind({"elementwise": 1.6, "attention": 1.1}, "streamed", 1e15, 0.0, platforms=("GPU", "TPU")),
}
# Stack that a chip is assumed to run if none is named: the kind of Megatron and NeMo on GPUs, as most published runs use it
# (calibrate/published_runs/runs.csv), and MaxText on TPUs, as all of theirs do.
DEFAULT_STACK: Mapping[str, str] = {"GPU": "fused", "TPU": "maxtext"}
# Kind of software that matches no stack of the table: the first pattern that fits.
SOFTWARE_PATTERNS = (
    (r"jax|xla|maxtext|compile|tpu", "compiled"),
    (r"megatron|nemo|transformer engine|primus", "fused"),
    (r"", "eager"),
)
DEFAULT_PRECISION = "bf16"  # if no stack is named, or its users' recipe is unknown
FP16_PRECISIONS = (
    "fp16",
    "fp16_fp32_update",
)  # recipes of chips that have fp16 and no bf16 (V100): the first that a stack has


# How the host launches a layer with experts: every kernel, waiting for the router's counts; `router`: attention and router are
# replayed as CUDA graphs; `step`: the whole step is.
RoutedGraphs = Literal["none", "router", "step"]
# What an exchange between groups of devices moves of a token: a copy for each of its experts, or one for each group with any of
# them, which the group distributes (DeepEP, HybridEP).
Dispatch = Literal["per_expert", "per_group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLayers:
    """How a stack's recipes run layers with experts.

    They say so of `chips`, all if empty, and of `models`, a pattern of names. `overlaps`: exchanges of tokens run beside the
    kernels of another micro-batch.
    """

    chips: tuple[str, ...] = ()
    models: str = ""
    graphs: RoutedGraphs = "none"
    dispatch: Dispatch = "per_expert"
    overlaps: bool = False
    source: str = ""

    def holds(self, chip: str, model: str) -> bool:
        """Return True if it is of a chip and a model."""
        return (not self.chips or chip in self.chips) and bool(re.search(self.models, model, re.IGNORECASE))


def _routed_layers(entry: Mapping[str, Any]) -> tuple[RoutedLayers, ...]:
    tables = _inherited(entry, "routed", [])
    return tuple(RoutedLayers(**{**table, "chips": tuple(table.get("chips", ()))}) for table in tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Software stack as its table describes it: its kind, and whether attention writes its scores. `known`: published runs
    measured it.

    `platforms`: chips that it runs on. `loss`: the cross-entropy that it is assumed to use. `abilities`: what it can run.
    `host_s`: seconds of the host per launched kernel; 0 if devices never wait for it. `overlaps_tp`: it moves tensor
    parallelism's operands in pieces beside matmuls, whatever a layout says. `dropout`: its users train with dropout.
    `priors`: those of constants before it is fitted, where they differ from its kind's; `shares`: of constants that it has with
    another stack, that stack's name. `updates_on_host`: the host updates an optimizer's state that is offloaded to it.
    `short_micro_batches`: the last micro-batch of a step may have fewer sequences than the others, and takes as much less time.
    `whole_gradients`: when it reduces gradients of ZeRO-2 and -3 in a step's last micro-batch only. `casts`: where it casts the
    operands of low-precision matmuls, and `weight_casts` how often weights that rest whole. `precision`: the recipe that its
    users run by default, with its source.
    """

    name: str
    kind: str
    loss: str
    platforms: tuple[str, ...]
    abilities: Abilities
    unfused_attention: bool = False
    host_s: float = 0.0
    overlaps_tp: bool = False
    updates_on_host: bool = False
    short_micro_batches: bool = False
    casts: Casts = "everywhere"
    weight_casts: WeightCasts = "each_use"
    router_weights: RouterWeights = "results"
    dropout: bool = False
    whole_gradients: WholeGradients = "never"
    precision: str = DEFAULT_PRECISION
    precision_source: str = ""
    is_known: bool = True
    routed: tuple[RoutedLayers, ...] = ()
    shares: Mapping[str, str] = field(default_factory=dict, hash=False)
    priors: Mapping[str, float] = field(default_factory=dict, hash=False)

    def routed_layers(self, chip: str, model: str) -> RoutedLayers:
        """Return how the stack's recipes run layers with experts of a model, by name, on a chip: the first that holds."""
        return next((recipe for recipe in self.routed if recipe.holds(chip, model)), RoutedLayers())

    @property
    def overlaps_gradients(self) -> bool:
        """True if tensor parallelism moves the inputs of matmuls, and their gradients, beside the weight-gradient matmuls.

        Source: Megatron-Core, tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.
        """
        return self.kind == "fused"

    @property
    def policy(self) -> IssuePolicy:
        """Policy of the collectives that the stack issues."""
        return IssuePolicy(
            bucket_bytes=STACK_KINDS[self.kind].bucket_bytes, casts=self.casts, weight_casts=self.weight_casts,
            router_weights=self.router_weights, dropout=self.dropout, whole_gradients=self.whole_gradients,
        )  # fmt: skip

    def constant_owner(self, constant: str) -> str:
        """Return the name of the stack whose runs fit a constant: its own, or that of the stack that it shares it with."""
        return self.shares.get(constant, self.name)

    def prior(self, constant: str) -> float:
        """Return the prior of a constant of the stack."""
        if constant in self.shares:
            return get_stack(self.shares[constant]).prior(constant)
        return {**STACK_KINDS[self.kind].priors, **self.priors}.get(constant, CONSTANTS[constant].prior)


@lru_cache(maxsize=1)
def _stack_tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(CATALOG.joinpath("stacks.toml").read_text(encoding="utf-8"))


def stack_names() -> tuple[str, ...]:
    """Return the stacks that published runs measured, and the kinds that represent others."""
    return (*_stack_tables(), *STACK_KINDS)


def get_stack(name: str) -> Stack:
    """Return a stack, or a kind of stack, by name. Raises `InputError` that lists the names."""
    entry = _stack_entry(name)
    kind = STACK_KINDS[entry["kind"]]
    return Stack(
        name=name, kind=entry["kind"], loss=entry.get("loss", kind.loss), platforms=tuple(entry.get("platforms", ("GPU",))),
        abilities=_abilities(name, entry), unfused_attention=entry.get("unfused_attention", False),
        host_s=entry.get("host_s", kind.host_s), overlaps_tp=entry.get("overlaps_tp", False),
        updates_on_host=_inherited(entry, "updates_on_host", False),
        short_micro_batches=_inherited(entry, "short_micro_batches", False),
        casts=entry.get("casts", "everywhere"), weight_casts=entry.get("weight_casts", "each_use"),
        router_weights=_inherited(entry, "router_weights", "results"),
        dropout=entry.get("dropout", False), whole_gradients=entry.get("whole_gradients", "never"),
        precision=_inherited(entry, "precision", DEFAULT_PRECISION), routed=_routed_layers(entry),
        priors=entry.get("priors", {}), shares=dict.fromkeys(entry.get("shares", ()), entry.get("as", "")),
        precision_source=_inherited(entry, "precision_source", ""), is_known=name not in STACK_KINDS,
    )  # fmt: skip


def _stack_entry(name: str) -> Mapping[str, Any]:
    """Return a stack's table, or that of a kind of stack. Raises `InputError` that lists the names."""
    if name in STACK_KINDS:
        return {"kind": name, "platforms": STACK_KINDS[name].platforms}
    if name not in _stack_tables():
        raise InputError(
            f"stack: found {name!r}{did_you_mean(name, stack_names())}; the stacks are {', '.join(stack_names())}"
        )
    return _stack_tables()[name]


def _inherited(entry: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return a value of a stack: its own, or that of the stack that it is `as`."""
    if key in entry:
        return entry[key]
    return _inherited(_stack_tables()[entry["as"]], key, default) if "as" in entry else default


def default_precision(stack: str | None, chips: Iterable[Chip] = ()) -> str:
    """Return the default precision recipe under a stack: the one that its users run, or that of fp16 for chips without bf16.

    Raises `InputError` for an unknown stack.

    >>> from shardwise.hardware.chips import load_chip
    >>> default_precision("nemo-25"), default_precision(None), default_precision(None, [load_chip("v100")])
    ('bf16_fp32_main_gradients', 'bf16', 'fp16')
    """
    recipe = DEFAULT_PRECISION if stack is None else get_stack(stack).precision
    needs_fp16 = any("fp16" in chip.peak_flops_per_s and "bf16" not in chip.peak_flops_per_s for chip in chips)
    if not needs_fp16:
        return recipe
    abilities = () if stack is None else get_stack(stack).abilities.precisions
    return next((name for name in FP16_PRECISIONS if name in abilities), FP16_PRECISIONS[0])


@lru_cache(maxsize=len(STACK_KINDS))
def _abilities_of_kind(kind: str) -> Abilities:
    """Return what at least one stack of a kind supports: no more is known of other software of that kind."""
    names = [name for name, entry in _stack_tables().items() if entry["kind"] == kind and _lists_abilities(entry)]
    return union_abilities([read_abilities(_stack_tables(), name) for name in names], f"any of {', '.join(names)}")


def _abilities(name: str, entry: Mapping[str, Any]) -> Abilities:
    """Return what a stack supports; if its table does not say, what others of its kind support."""
    return read_abilities(_stack_tables(), name) if _lists_abilities(entry) else _abilities_of_kind(entry["kind"])


def _lists_abilities(entry: Mapping[str, Any]) -> bool:
    """Return True if a stack's table lists its abilities or inherits them."""
    return "runs" in entry or "as" in entry


def default_stack(chip: Chip) -> Stack | None:
    """Return the typical stack of a chip, or None for a host and for chips of an unknown vendor."""
    return get_stack(DEFAULT_STACK[chip.platform]) if chip.platform else None


def match_stack(text: str) -> Stack:
    """Return the stack of a run's software: by its name, by what its log reports, or the most similar kind."""
    text = text.lower().strip()
    if text in stack_names():
        return get_stack(text)
    name = next((name for name, entry in _stack_tables().items() if re.search(entry["software"], text)), None)
    return get_stack(name or next(kind for pattern, kind in SOFTWARE_PATTERNS if re.search(pattern, text)))
