"""Software stacks by name: their kinds, what each supports, and its defaults.

`catalog/stacks.toml` says which stacks there are and what they can run; the rules of `layout.rules.stack_abilities`
apply it. A stack
that is not known is expected to be as others of its kind.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.hardware.chips import Chip
from shardwise.values.errors import InputError, did_you_mean
from shardwise.values.issue_policy import BUCKET_BYTES, Casts, IssuePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Layouts and jobs that a stack can run.

    `axes`: of tp, cp, pp and ep those that it has; `zero`: stages of ZeRO that it has beside plain replicas, `zero_with_pp` those
    that it has in a pipeline too. `zero_with_cp` and `zero_with_ep`: those with such an axis, over which some shard weights too;
    plain replicas (0) where they are among them. `schedules` of pipelines, `cp_variants`, policies of `recompute`, kinds of loss
    (`losses`), formats of `products` beside those of 16 and 32 bits, and what it can `offload`, are names of their tables.
    `uneven_stages`: a pipeline's stages may have numbers of layers of their own; `whole_experts`: experts may be whole where tp
    splits layers (`etp=1`). `source` says where that is written.
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
    offload: tuple[str, ...]
    sequence_parallel: bool
    async_tp: bool
    uneven_stages: bool
    whole_experts: bool
    source: str

    def items(self) -> list[tuple[str, Any]]:
        """Each ability by name, without the source."""
        return [(one.name, getattr(self, one.name)) for one in fields(self) if one.name != "source"]


def read_abilities(table: Mapping[str, Mapping[str, Any]], name: str) -> Abilities:
    """The abilities of a stack of the table: its own lines, and those of the stack that it is `as` for the rest.

    A table that does not say so has all its stages of ZeRO with any axis, and whole experts.
    """
    found: Any = {}
    at: str | None = name
    while at is not None:
        found = {**table[at].get("runs", {}), **found}
        at = table[at].get("as")
    every = sorted({0, *found["zero"]})
    found = {"zero_with_cp": every, "zero_with_ep": every, "whole_experts": True, **found}
    values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    return Abilities(**values)


def union_abilities(several: Iterable[Abilities], source: str) -> Abilities:
    """What at least one of several stacks supports."""
    every = list(several)
    found: dict[str, Any] = {}
    for name, first in every[0].items():
        values = [getattr(one, name) for one in every]
        found[name] = any(values) if isinstance(first, bool) else tuple(dict.fromkeys(v for own in values for v in own))
    return Abilities(**found, source=source)


CATALOG: Traversable = resources.files("shardwise.hardware").joinpath("catalog")
# What is expected of a stack before it is measured, where it differs from `CONSTANTS`. Eager PyTorch runs each operation as a
# kernel, and the attention kernels of 2023 were slower; Megatron and Transformer Engine fuse by hand; XLA and torch.compile
# fuse what is next to each other. Source: geometric means of the published runs of each kind, rounded.
STACK_KINDS: Mapping[str, Mapping[str, float]] = {
    "eager_2023": {"elementwise": 4.0, "attention": 1.4},
    "eager": {"elementwise": 3.0, "attention": 1.0},
    "fused": {"elementwise": 2.0, "attention": 1.0},
    "compiled": {"elementwise": 1.6, "attention": 1.1},
}
# The leanest cross-entropy (`values.loss_kernels.LOSS_KERNELS`) that software of each kind has, where its entry names no other.
# Source: PyTorch's own; Megatron-Core, --cross-entropy-loss-fusion; XLA and torch.compile fuse the loss into
# kernels that read logits once.
LEANEST_LOSS: Mapping[str, str] = {
    "eager_2023": "unfused", "eager": "unfused", "fused": "fused", "compiled": "streamed",
}  # fmt: skip
# Bytes of gradients that each kind reduces at once where they rest whole. Sources: PyTorch's DistributedDataParallel,
# bucket_cap_mb; Megatron-Core, DistributedDataParallelConfig.bucket_size: 40 million parameters, here in fp32; XLA reduces the
# stacked gradients of a scan over layers as one array, which is more than any unit has.
GRADIENT_BUCKET_BYTES: Mapping[str, float] = {
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
DEFAULT_STACK: Mapping[str, str] = {"GPU": "fused", "TPU": "maxtext"}
# Of which kind software is that no stack of the table matches: the first line that fits.
SOFTWARE_PATTERNS = (
    (r"jax|xla|maxtext|compile|tpu", "compiled"),
    (r"megatron|nemo|transformer engine|primus", "fused"),
    (r"", "eager"),
)
DEFAULT_PRECISION = "bf16"  # where no stack is named, or nothing is known of what its users run


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
    precision: str = DEFAULT_PRECISION
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
        return IssuePolicy(bucket_bytes=GRADIENT_BUCKET_BYTES[self.kind], casts=self.casts)

    def prior(self, constant: str) -> float:
        """The prior of a constant of the stack."""
        return STACK_KINDS[self.kind].get(constant, CONSTANTS[constant].prior)


@lru_cache(maxsize=1)
def _stack_tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(CATALOG.joinpath("stacks.toml").read_text(encoding="utf-8"))


def stack_names() -> tuple[str, ...]:
    """Stacks that published runs measured, and the kinds that represent others."""
    return (*_stack_tables(), *STACK_KINDS)


def get_stack(name: str) -> Stack:
    """A stack by name, or a kind of stack. Raises `InputError` that lists the names."""
    if name in STACK_KINDS:
        platforms = ("GPU", "TPU") if name == "compiled" else ("GPU",)
        return Stack(
            name=name, kind=name, loss=LEANEST_LOSS[name], platforms=platforms, known=False, host_s=HOST_S[name],
            abilities=_abilities_of_kind(name),
        )  # fmt: skip
    if name not in _stack_tables():
        raise InputError(
            f"stack: found {name!r}{did_you_mean(name, stack_names())}; the stacks are {', '.join(stack_names())}"
        )
    entry = _stack_tables()[name]
    return Stack(
        name=name, kind=entry["kind"], loss=entry.get("loss", LEANEST_LOSS[entry["kind"]]),
        platforms=tuple(entry.get("platforms", ("GPU",))), unfused_attention=entry.get("unfused_attention", False),
        host_s=entry.get("host_s", HOST_S[entry["kind"]]), overlaps_tp=entry.get("overlaps_tp", False),
        casts=entry.get("casts", "everywhere"),
        abilities=_abilities(name), precision=_inherited(name, "precision", DEFAULT_PRECISION),
        precision_source=_inherited(name, "precision_source", ""),
    )  # fmt: skip


def _inherited(name: str, key: str, default: str) -> str:
    """A value of a stack of the table: its own, or that of the stack that it is `as`."""
    entry = _stack_tables()[name]
    own: str | None = entry.get(key)
    return own or (_inherited(entry["as"], key, default) if "as" in entry else default)


def default_precision(stack: str | None) -> str:
    """The precision recipe of a job under a stack, where neither is said: that of the stack's users. Raises `InputError` for an
    unknown stack.

    >>> default_precision("nemo-25"), default_precision(None)
    ('bf16_fp32_main_gradients', 'bf16')
    """
    return DEFAULT_PRECISION if stack is None else get_stack(stack).precision


@lru_cache(maxsize=len(STACK_KINDS))
def _abilities_of_kind(kind: str) -> Abilities:
    """What at least one of the stacks of a kind supports: no more is known of software of that kind."""
    names = [name for name, entry in _stack_tables().items() if entry["kind"] == kind and _lists_abilities(entry)]
    return union_abilities([read_abilities(_stack_tables(), name) for name in names], f"any of {', '.join(names)}")


def _abilities(name: str) -> Abilities:
    """What a stack of the table supports; where its table does not say, what others of its kind support."""
    entry = _stack_tables()[name]
    return read_abilities(_stack_tables(), name) if _lists_abilities(entry) else _abilities_of_kind(entry["kind"])


def _lists_abilities(entry: Mapping[str, Any]) -> bool:
    """Whether a stack's table says what it supports."""
    return "runs" in entry or "as" in entry


def default_stack(chip: Chip) -> Stack | None:
    """The typical stack of a chip; None for a host, and for chips of an unknown vendor."""
    return get_stack(DEFAULT_STACK[chip.platform]) if chip.platform else None


def match_stack(text: str) -> Stack:
    """The stack of a run's software: by its own name, by what its log reports, or the kind that it is most like."""
    text = text.lower().strip()
    if text in stack_names():
        return get_stack(text)
    name = next((name for name, entry in _stack_tables().items() if re.search(entry["software"], text)), None)
    return get_stack(name or next(kind for pattern, kind in SOFTWARE_PATTERNS if re.search(pattern, text)))
