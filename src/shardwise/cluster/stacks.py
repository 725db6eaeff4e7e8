"""Software stacks by name, and the constants that published runs give for them and for chips.

`measured/stacks.toml` says which stacks there are, `measured/constants.toml` what was fitted (`benchmarks/published.py` writes
it). A stack that is not known is expected to be as others of its kind; a chip that no run has, as the chip that it is like.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

from shardwise.cluster.abilities import Abilities, abilities_of, any_of
from shardwise.cluster.calibration import CONSTANTS, SPREAD_OF, Calibration
from shardwise.cluster.chip import Chip
from shardwise.cluster.chips import chip_names, load_chip, usual_clock
from shardwise.cluster.cluster import Cluster
from shardwise.errors import InputError
from shardwise.issuing import BUCKET_BYTES, Casts, IssuePolicy
from shardwise.names import did_you_mean

MEASURED: Traversable = resources.files("shardwise.cluster").joinpath("measured")
# What is expected of a stack before it is measured, where it differs from `CONSTANTS`. Eager PyTorch runs each operation as a
# kernel, and the attention kernels of 2023 were slower; Megatron and Transformer Engine fuse by hand; XLA and torch.compile
# fuse what is next to each other. Source: geometric means of the published runs of each kind, rounded.
KINDS: Mapping[str, Mapping[str, float]] = {
    "eager_2023": {"elementwise": 4.0, "attention": 1.4},
    "eager": {"elementwise": 3.0, "attention": 1.0},
    "fused": {"elementwise": 2.0, "attention": 1.0},
    "compiled": {"elementwise": 1.6, "attention": 1.1},
}
# The leanest cross-entropy (`loss.LOSSES`) that software of each kind has, where its entry names no other. Source: PyTorch's own;
# Megatron-Core, --cross-entropy-loss-fusion; XLA and torch.compile fuse the loss into kernels that read logits once.
LEANEST_LOSS: Mapping[str, str] = {
    "eager_2023": "unfused", "eager": "unfused", "fused": "fused", "compiled": "streamed",
}  # fmt: skip
# Bytes of gradients that each kind reduces at once where they rest whole. Sources: PyTorch's DistributedDataParallel,
# bucket_cap_mb; Megatron-Core, DistributedDataParallelConfig.bucket_size: 40 million parameters, here in fp32; XLA reduces the
# stacked gradients of a scan over layers as one array, which is more than any unit has.
REDUCED_BYTES: Mapping[str, float] = {
    "eager_2023": BUCKET_BYTES,
    "eager": BUCKET_BYTES,
    "fused": 160e6,
    "compiled": 1e15,
}
# Seconds that the host takes for a kernel of those that are counted here, where it launches each: small models under Megatron-LM
# of 2022 take 3.3 to 3.6 ms for a layer of some 40, forward and backward, however short these are. Of 70, 80, ... 110
# microseconds the one of least squared error over the first half of calibrate/published_runs/layouts.csv; published runs of
# other stacks of these kinds do not contradict it. XLA and torch.compile launch far less.
HOST_S: Mapping[str, float] = {"eager_2023": 100e-6, "eager": 100e-6, "fused": 100e-6, "compiled": 0.0}
# The stack that a chip is taken to run where none is named: the kind of Megatron and NeMo on GPUs, of which most published runs
# are (calibrate/published_runs/runs.csv), and MaxText on TPUs, which all of theirs are.
TYPICAL: Mapping[str, str] = {"GPU": "fused", "TPU": "maxtext"}
# Of which kind software is that no stack of the table matches: the first line that fits.
OTHERS = (
    (r"jax|xla|maxtext|compile|tpu", "compiled"),
    (r"megatron|nemo|transformer engine|primus", "fused"),
    (r"", "eager"),
)
USUAL_PRECISION = "bf16"  # where no stack is named, or nothing is known of what its users run
MODELS: Mapping[str, str] = {"dense": "dense models", "moe": "mixtures of experts"}
KNOWN = 5  # runs of a kind of model by a stack on a chip, from which on its predictions are those of a known stack
# Chips without published runs, and those that they are like: the same architecture with other memory or links.
LIKE: Mapping[str, str] = {
    "h800": "h100", "h100-pcie": "h100", "h200": "h100", "a100-40gb": "a100-80gb", "a100-80gb-pcie": "a100-80gb",
    "b300": "b200", "gb300": "gb200", "tpu-v4": "tpu-v5p", "tpu-v3": "tpu-v5p", "tpu-v7x": "tpu-v6e",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack as its table says: its kind, and whether attention writes its scores. `known`: published runs measured it.

    `platforms`: which chips it runs on. `loss`: the cross-entropy that it is taken to have. `abilities`: what it can run.
    `host_s`: seconds that the host takes for a kernel of those that are counted here; 0 where it is never what devices wait for.
    `overlaps_tp`: it moves tensor parallelism's operands in pieces beside products, whatever a layout says. `casts`: where it
    casts what narrow products take. `precision`: the recipe that its users run where they name none, and where that is said.
    """

    name: str
    kind: str
    loss: str
    platforms: tuple[str, ...]
    abilities: Abilities
    unfused_attention: bool = False
    host_s: float = 0.0
    overlaps_tp: bool = False
    casts: Casts = "everywhere"
    precision: str = USUAL_PRECISION
    precision_source: str = ""
    known: bool = True

    @property
    def overlaps_gradients(self) -> bool:
        """Whether tensor parallelism moves the inputs of products, and their gradients, beside the products of the weights' own.

        Source: Megatron-Core, tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.
        """
        return self.kind == "fused"

    @property
    def policy(self) -> IssuePolicy:
        """What it issues, as a policy."""
        return IssuePolicy(bucket_bytes=REDUCED_BYTES[self.kind], casts=self.casts)

    def prior(self, constant: str) -> float:
        """The prior of a constant of the stack."""
        return KINDS[self.kind].get(constant, CONSTANTS[constant].prior)


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(MEASURED.joinpath("stacks.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def fitted() -> Mapping[str, Any]:
    """The results of the fit: constants by chip and by stack, their widths, the spread of predictions."""
    return tomllib.loads(MEASURED.joinpath("constants.toml").read_text(encoding="utf-8"))


def stack_names() -> tuple[str, ...]:
    """Stacks that published runs measured, and the kinds that represent others."""
    return (*_table(), *KINDS)


def stack_named(name: str) -> Stack:
    """A stack by name, or a kind of stack. Raises `InputError` that lists the names."""
    if name in KINDS:
        platforms = ("GPU", "TPU") if name == "compiled" else ("GPU",)
        return Stack(
            name=name, kind=name, loss=LEANEST_LOSS[name], platforms=platforms, known=False, host_s=HOST_S[name],
            abilities=_abilities_of_kind(name),
        )  # fmt: skip
    if name not in _table():
        raise InputError(
            f"stack: found {name!r}{did_you_mean(name, stack_names())}; the stacks are {', '.join(stack_names())}"
        )
    entry = _table()[name]
    return Stack(
        name=name, kind=entry["kind"], loss=entry.get("loss", LEANEST_LOSS[entry["kind"]]),
        platforms=tuple(entry.get("platforms", ("GPU",))), unfused_attention=entry.get("unfused_attention", False),
        host_s=entry.get("host_s", HOST_S[entry["kind"]]), overlaps_tp=entry.get("overlaps_tp", False),
        casts=entry.get("casts", "everywhere"),
        abilities=_abilities(name), precision=_inherited(name, "precision", USUAL_PRECISION),
        precision_source=_inherited(name, "precision_source", ""),
    )  # fmt: skip


def _inherited(name: str, key: str, default: str) -> str:
    """A value of a stack of the table: its own, or that of the stack that it is `as`."""
    entry = _table()[name]
    own: str | None = entry.get(key)
    return own or (_inherited(entry["as"], key, default) if "as" in entry else default)


def usual_precision(stack: str | None) -> str:
    """The precision recipe of a job under a stack, where neither is said: that of the stack's users. Raises `InputError` for an
    unknown stack.

    >>> usual_precision("nemo-25"), usual_precision(None)
    ('bf16_fp32_main_gradients', 'bf16')
    """
    return USUAL_PRECISION if stack is None else stack_named(stack).precision


@lru_cache(maxsize=len(KINDS))
def _abilities_of_kind(kind: str) -> Abilities:
    """What at least one of the stacks of a kind supports: no more is known of software of that kind."""
    names = [name for name, entry in _table().items() if entry["kind"] == kind and _says(entry)]
    return any_of([abilities_of(_table(), name) for name in names], f"any of {', '.join(names)}")


def _abilities(name: str) -> Abilities:
    """What a stack of the table supports; where its table does not say, what others of its kind support."""
    entry = _table()[name]
    return abilities_of(_table(), name) if _says(entry) else _abilities_of_kind(entry["kind"])


def _says(entry: Mapping[str, Any]) -> bool:
    """Whether a stack's table says what it supports."""
    return "runs" in entry or "as" in entry


def typical_stack(chip: Chip) -> Stack | None:
    """The typical stack of a chip; None for a host, and for chips of an unknown vendor."""
    return stack_named(TYPICAL[chip.platform]) if chip.platform else None


def stack_of_software(text: str) -> Stack:
    """The stack of a run's software: by its own name, by what its log reports, or the kind that it is most like."""
    text = text.lower().strip()
    if text in stack_names():
        return stack_named(text)
    name = next((name for name, entry in _table().items() if re.search(entry["software"], text)), None)
    return stack_named(name or next(kind for pattern, kind in OTHERS if re.search(pattern, text)))


class Fitted(NamedTuple):
    """An estimated constant: its value, its standard deviation on the unbounded scale, and the source of both."""

    value: float
    deviation: float
    source: str


def stands_for(chip: str) -> str | None:
    """The chip with published runs whose constants a chip uses: itself, the one that it resembles, or None."""
    return next((name for name in (chip, LIKE.get(chip)) if name in fitted()["chips"]), None)


def is_measured(stack: Stack) -> bool:
    """Whether published runs are of the stack itself, not only of others of its kind."""
    return stack.known and stack.name in fitted()["stacks"]


def constants_known(chip: str, stack: Stack) -> dict[str, Fitted]:
    """The twelve constants of a chip under a stack: as fitted, else those of the chip that it resembles, else the priors."""
    like = stands_for(chip)
    entries = {"chip": fitted()["chips"].get(like, {}), "stack": fitted()["stacks"].get(stack.name, {})}
    sources = {
        "chip": fitted()["source"] + (f"; {chip} as {like}" if like != chip else ""), "stack": fitted()["source"],
    }  # fmt: skip
    expected = {"chip": f"no run of {chip}: what is expected of any chip", "stack": f"usual of its kind, {stack.kind}"}
    found = {}
    for name, one in CONSTANTS.items():
        entry = entries[one.owner]
        prior = _chip_prior(chip, name) if one.owner == "chip" else stack.prior(name)
        found[name] = (
            Fitted(float(entry[name]), float(entry["deviations"][name]), sources[one.owner])
            if name in entry
            else Fitted(prior, one.width, expected[one.owner])
        )
    return found


def _chip_prior(chip: str, name: str) -> float:
    """Where a constant of a chip without runs is expected: no faster than what micro-benchmarks reach on it."""
    prior = CONSTANTS[name].prior
    reached = getattr(load_chip(chip), name, None) if chip in chip_names() else None
    return max(min(prior, float(reached)), CONSTANTS[name].low) if reached is not None else prior


def num_runs(chip: str, stack: Stack, kind: str) -> int:
    """Published runs of a kind of model ("dense", "moe") by a stack on this very chip."""
    return int(fitted()["runs"].get(stack.name, {}).get(chip, {}).get(kind, 0))


def constants_of(chip: str, stack: Stack) -> dict[str, float]:
    """The values of the twelve constants."""
    return {name: one.value for name, one in constants_known(chip, stack).items()}


def calibration_of(chip: str, stack: Stack) -> Calibration:
    """The calibration from published runs of a chip under a stack, with the spread of predictions for known or unknown stacks.

    `spread_notes` name what had no runs, or too few, and what is used instead.
    """
    spread = {
        kind: fitted()["spread"]["known" if num_runs(chip, stack, kind) >= KNOWN else "unknown"][kind]
        for kind in SPREAD_OF
    }
    return Calibration(
        stack=stack.name, fused_attention=not stack.unfused_attention,
        spread={kind: (float(low), float(high)) for kind, (low, high) in spread.items()},
        constants=constants_of(chip, stack), loss=stack.loss,
        source=fitted()["source"], spread_notes=_spread_notes(chip, stack),
    )  # fmt: skip


def _spread_notes(chip: str, stack: Stack) -> dict[str, str]:
    """By kind of model, why the spread is that of an unknown stack; kinds with their own spread are left out."""
    without, few = tuple(_without_runs(chip, stack)), dict(_few_runs(chip, stack))
    found = {kind: "; ".join((*without, *([few[kind]] if kind in few else []))) for kind in SPREAD_OF}
    return {kind: note for kind, note in found.items() if note}


def _without_runs(chip: str, stack: Stack) -> Iterator[str]:
    """What had no published runs, and what is used instead."""
    like = stands_for(chip)
    if like is None:
        yield f"no published run is of {chip}, which has what is expected of any chip"
    elif like != chip:
        yield f"no published run is of {chip}, which is taken to be as {like}"
    if not stack.known:
        yield f"the stack is not known, and has the defaults of its kind, {stack.kind}: --stack NAME narrows the interval"
    elif not is_measured(stack):
        yield f"no published run is of {stack.name}, which has the defaults of its kind, {stack.kind}"


def _few_runs(chip: str, stack: Stack) -> Iterator[tuple[str, str]]:
    """Kinds of model that too few runs of a measured stack on this very chip are of, each with what follows for it."""
    if stands_for(chip) != chip or not is_measured(stack):
        return
    for kind in SPREAD_OF:
        if num_runs(chip, stack, kind) < KNOWN:
            words = f"fewer than {KNOWN} published runs are of {stack.name} on {chip} with {MODELS[kind]}"
            yield kind, f"{words}: the interval is that of a new stack"


def predicted(cluster: Cluster, stack: Stack) -> Cluster:
    """The cluster with what published runs say about its chip under a stack.

    Raises `InputError` for a stack that runs on other chips; of a chip whose platform is not known any is taken.
    """
    chip = cluster.chip
    if chip.platform and chip.platform not in stack.platforms:
        fitting = ", ".join(name for name in stack_names() if chip.platform in stack_named(name).platforms)
        raise InputError(
            f"stack: {stack.name} runs on {' and '.join(stack.platforms)}s, and {chip.name} is a {chip.platform}; one of "
            f"{fitting} is required"
        )
    return calibrated(cluster, replace(calibration_of(chip.catalogued, stack), clock=usual_clock(chip)))


def calibrated(cluster: Cluster, calibration: Calibration) -> Cluster:
    """The cluster with a calibration, which replaces the one that it has."""
    return replace(cluster, calibration=calibration)


def rated(cluster: Cluster) -> Cluster:
    """The cluster without its calibration."""
    return replace(cluster, calibration=None)
