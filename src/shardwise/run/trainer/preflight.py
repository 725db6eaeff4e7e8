"""Checks before a run starts: that plan, data and machine fit together. Needs no PyTorch.

If a plan does not fit in the memory that a device really has, the smallest change that fits is named; if devices are
missing, a plan is searched for those that remain.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import combinations, product
from typing import Any

from shardwise.hardware.cluster_loading import resize_cluster
from shardwise.layout import Layout, choices_from_pins, require_runnable, violations
from shardwise.layout.rules.engine import pin_flags
from shardwise.model import POLICIES
from shardwise.price import Estimate, Problem
from shardwise.price.estimate import estimate
from shardwise.records.run_folder import RunInputs
from shardwise.run.data.batches import Batches
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.recipe import TrainingRecipe, recipe_payload, source_names
from shardwise.run.trainer.batch_schedule import batch_ramp, require_batches
from shardwise.run.trainer.engine_prediction import engine_memory, engine_policy
from shardwise.run.trainer.flags import RunSettings
from shardwise.run.trainer.run_identity import RunIdentity
from shardwise.search import Plan, plan_payload
from shardwise.search import make_plan as search_plan
from shardwise.search.plan import software_versions
from shardwise.values import (
    InputError,
    IssuePolicy,
    NothingFitsError,
    format_bytes,
    get_precision,
    raise_problems,
    run_all,
)


@dataclass(frozen=True, slots=True)
class RunData:
    """The sequences of a run. `names` of the sources; `held_out` has those with at least one held-out sequence."""

    names: tuple[str, ...]
    train: Batches
    held_out: Mapping[str, Batches]

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source in the samples."""
        return dict(zip(self.names, self.train.mixture.shares, strict=True))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the only source, or a hash of all fingerprints, in order, with the draws of each."""
        fingerprints = [source.shards.index.fingerprint for source in self.train.sources]
        drawn_sources = list(zip(fingerprints, self.train.mixture.num_draws, strict=True))
        return (
            fingerprints[0]
            if len(fingerprints) == 1
            else hashlib.sha256(json.dumps(drawn_sources).encode("utf-8")).hexdigest()
        )

    @property
    def unigram_entropy_nats(self) -> float:
        """Nats per token of a model that knows each source's token frequencies: the mean by share."""
        entropies = (source.shards.index.unigram_entropy_nats for source in self.train.sources)
        return math.fsum(share * entropy for share, entropy in zip(self.train.mixture.shares, entropies, strict=True))

    def mean_loss(self, losses: Mapping[str, float]) -> float | None:
        """Return the mean of held-out losses by the shares of their sources; None without any."""
        if not losses:
            return None
        shares = self.shares
        return sum(shares[name] * loss for name, loss in losses.items()) / sum(shares[name] for name in losses)


def require_world(plan: Plan, world_size: int) -> None:
    """Raise `InputError` unless there are as many processes as the plan has devices."""
    if world_size != plan.layout.num_devices:
        raise InputError(
            f"world size: found {world_size} processes; the plan ({plan.layout}) is of {plan.layout.num_devices} devices: start "
            "one process for each, or plan for the devices that there are"
        )


def open_data(plan: Plan, settings: RunSettings) -> RunData:
    """Open the data of a run. Raises `InputError` if it is damaged, too short, or of a larger vocabulary than the
    model's."""
    recipe, seq_len = settings.recipe, plan.job.seq_len
    sources = run_all(*(partial(_open_shards, folder, plan) for folder, _ in recipe.data))
    train = Batches(
        sources, seq_len=seq_len, batch=batch_ramp(plan, recipe), seed=recipe.seed, ignore_boundaries=recipe.respect_documents,
        weights=[weight for _, weight in recipe.data],
    )  # fmt: skip
    names = source_names(recipe.data)
    held_out = zip(
        names, run_all(*(partial(_open_held_out, folder, plan, recipe) for folder, _ in recipe.data)), strict=True
    )
    return RunData(names, train, {name: batches for name, batches in held_out if batches is not None})


def _open_shards(folder: str, plan: Plan) -> TokenShards:
    shards = TokenShards(folder)
    shards.require_vocabulary(plan.model.vocab_size)
    return shards


def _open_held_out(folder: str, plan: Plan, recipe: TrainingRecipe) -> Batches | None:
    """Return the held-out text of a source as one step of all its sequences, in text order; None if it has less than
    one."""
    try:
        shards, seq_len = TokenShards(folder, "held_out"), plan.job.seq_len
        num_sequences = max((shards.num_tokens - 1) // seq_len, 1)
        return Batches(
            shards, seq_len=seq_len, batch=num_sequences, seed=None, ignore_boundaries=recipe.respect_documents
        )
    except InputError:
        if recipe.validate_every:
            raise
        return None


def check_run(plan: Plan, settings: RunSettings) -> RunData:
    """Run all checks of a run at once and return its data. Raises `InputError`."""
    precision = get_precision(plan.job.precision)
    *_, data = run_all(
        lambda: require_runnable(plan.model, plan.layout, precision, plan.job.optimizer),
        lambda: require_batches(plan, settings.recipe),
        lambda: None if settings.resume else recipe_payload(settings.recipe, plan.job.optimizer),
        lambda: open_data(plan, settings),
    )
    assert isinstance(data, RunData)
    require_tensorboard(settings)
    if settings.resume:
        require_same_run(settings, RunIdentity.of(plan, settings.recipe, data.fingerprint))
        # After `require_same_run`, which reports another optimizer; its fields are no fault of the recipe.
        recipe_payload(settings.recipe, plan.job.optimizer)
    return data


def require_tensorboard(settings: RunSettings) -> None:
    """Raise `InputError` if TensorBoard is requested and not installed."""
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise InputError("--tensorboard: the tensorboard package is not installed; pip install tensorboard")


def describe_run(plan: Plan, recipe: TrainingRecipe, data: RunData) -> RunInputs:
    """Return what the run's folder keeps of plan, recipe, data and versions."""
    return RunInputs(
        plan=plan_payload(plan), recipe=recipe_payload(recipe, plan.job.optimizer),
        data_fingerprint=data.fingerprint, versions=software_versions(),
    )  # fmt: skip


def require_same_run(settings: RunSettings, identity: RunIdentity) -> None:
    """Raise `InputError` that lists how a run that goes on differs from what it was; with `--force` it may."""
    if not settings.force:
        recorded = RunIdentity.in_folder(settings.out)
        raise_problems(identity.differences(recorded.fields, f"the run in {settings.out.path}"))


LayoutChange = Mapping[str, Any]  # fields of a layout, with their new values


def require_memory(plan: Plan, recipe: TrainingRecipe, available_bytes: int, device: str) -> None:
    """Raise `NothingFitsError` if the predicted peak exceeds `available_bytes`, naming the smallest change that fits."""
    policy = engine_policy(plan, recipe)
    required_bytes = sum(engine_memory(plan, recipe).values())
    if required_bytes <= available_bytes:
        return
    smallest = smallest_change(plan, available_bytes, policy)
    if smallest is None:
        help_text = (
            "no change of one or two of recomputation, micro-batch and ZeRO stage fits, and other degrees were not tried: plan "
            "again, use more devices, or a smaller model or sequence"
        )
    else:
        change, priced = smallest
        current = plan.estimate if policy is None else estimate(plan.problem, plan.layout, policy)
        slower = priced.step_time_s / current.step_time_s - 1
        help_text = (
            f"the smallest change that fits takes {format_bytes(priced.memory_bytes)} and is {slower:+.1%} in time: plan again "
            f"with {pin_flags(change)}"
        )
    raise NothingFitsError(
        f"the plan takes {format_bytes(required_bytes)} on each device, by its estimate, and {device} has "
        f"{format_bytes(available_bytes)}: {help_text}"
    )


def smallest_change(
    plan: Plan, available_bytes: int, policy: IssuePolicy | None = None
) -> tuple[LayoutChange, Estimate] | None:
    """Return the fastest change of one choice (recomputation, micro-batch, ZeRO stage) that fits, or else of two, or
    None."""
    choices = [
        list(changes(plan.layout)) for changes in (_recompute_changes, _micro_batch_changes, _zero_stage_changes)
    ]
    for num_changes in (1, 2):
        fitting = []
        for chosen in combinations(choices, num_changes):
            for changes in product(*chosen):
                merged = {name: value for change in changes for name, value in change.items()}
                priced = _price_change(plan, replace(plan.layout, **merged), policy)
                fitting += [(merged, priced)] if priced and priced.memory_bytes <= available_bytes else []
        if fitting:
            return min(fitting, key=lambda pair: pair[1].step_time_s)
    return None


def _price_change(plan: Plan, layout: Layout, policy: IssuePolicy | None) -> Estimate | None:
    if violations(plan.model, plan.job, plan.cluster.num_devices, layout):
        return None
    return estimate(plan.problem, layout, policy)


def _recompute_changes(layout: Layout) -> Iterator[LayoutChange]:
    """Yield policies that keep less, and for a policy of some layers the same for all layers."""
    leaner = tuple(POLICIES)[1:] if layout.recompute == "none" else ("full",)
    part: LayoutChange = {} if layout.recompute_layers is None else {"recompute_layers": None}
    for policy in dict.fromkeys((layout.recompute, *leaner)):
        if part or policy != layout.recompute:
            yield {"recompute": policy, **part}


def _micro_batch_changes(layout: Layout) -> Iterator[LayoutChange]:
    size = layout.micro_batch_seqs
    while size > 1:
        size //= 2
        yield {"micro_batch_seqs": size}


def _zero_stage_changes(layout: Layout) -> Iterator[LayoutChange]:
    """Yield higher ZeRO stages; replicas become shards if there are no shards yet."""
    sharded: LayoutChange = {"dp": 1, "fsdp": layout.dp} if layout.fsdp == 1 and layout.dp > 1 else {}
    for stage in range(layout.zero_stage + 1, 4):
        yield {**sharded, "zero_stage": stage}


def replan_for(plan: Plan, num_devices: int) -> Plan:
    """Return a plan of the same model and job for `num_devices` devices of the cluster; the global batch and samples
    stay.

    A plan for that many devices is returned unchanged. Raises `InputError` for a number of devices that the cluster
    cannot have, and `NothingFitsError` if the job does not fit on them.
    """
    if num_devices == plan.layout.num_devices:
        return plan
    reliability = plan.run.reliability if plan.run else None
    cluster = resize_cluster(plan.cluster, num_devices)
    choices = choices_from_pins({}, {}, runnable=True)
    return search_plan(Problem(plan.model, cluster, plan.job), choices=choices, reliability=reliability)
