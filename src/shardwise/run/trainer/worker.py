"""A run on one rank, from the checks before it starts to its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from shardwise.layout import require_runnable
from shardwise.run.checkpoints import latest
from shardwise.run.faults.agreement import RankGroup, all_gather_texts, require_on_all_ranks
from shardwise.run.faults.rank_exit import guard_run
from shardwise.run.faults.rank_status import Peer, set_stage
from shardwise.run.faults.stop_request import StopRequest, report_once_per_host
from shardwise.run.folder_lock import RunLock
from shardwise.run.machine_resources import device_bytes
from shardwise.run.trainer.flags import RunSettings
from shardwise.run.trainer.interfaces import RunComponents
from shardwise.run.trainer.loop import RunEnd, TrainingLoop
from shardwise.run.trainer.machine_probe import MachineProbe
from shardwise.run.trainer.preflight import RunData, check_run, describe_run, replan_for, require_memory, require_world
from shardwise.run.trainer.run_identity import RunIdentity
from shardwise.search import Plan, load_plan
from shardwise.values import InputError, get_precision


def run_rank(settings: RunSettings, components: RunComponents, stop: StopRequest | None = None) -> RunEnd:
    """Train on this rank, one of as many as the plan has devices; torchrun's environment says which.

    `stop`: an existing recorder of requests to stop. Raises `ShardwiseError` on one rank if something is wrong, and
    `SystemExit` with its code on the others.
    """
    set_stage("the start")
    plan, world = _load_plan_and_join(settings, components, stop)
    with StopRequest() if stop is None else nullcontext(stop) as stop_request:
        try:
            with (
                guard_run(world, settings.recipe, stop_request, lambda: _resume_hint(settings)),
                RunLock(settings.out.path) as lock,
            ):
                run_end = _train(plan, settings, components, world, lock, stop_request)
        except BaseException:
            if world.size == 1:
                components.leave()  # with several ranks this would wait for ranks that may be lost
            raise
    components.leave()
    return run_end


def _train(
    plan: Plan, settings: RunSettings, components: RunComponents, world: RankGroup, lock: RunLock, stop: StopRequest
) -> RunEnd:
    set_stage("the checks before the first step")
    require_on_all_ranks(
        world, partial(_require_same_layout, str(plan.layout), all_gather_texts(world, str(plan.layout)))
    )
    data = require_on_all_ranks(world, lambda: _check_rank(plan, settings, components, world, lock))
    # Measured before the model fills the device.
    measuring = MachineProbe(world, settings.out, lambda: components.probe(plan, world))
    trainer = require_on_all_ranks(world, lambda: components.trainer(plan, settings.recipe, data.train, world))
    require_on_all_ranks(world, lambda: _begin_run(plan, settings, data, lock) if world.rank == 0 else None)
    peers = world.rendezvous.peers if world.rendezvous else (Peer.of_this_process(),)
    require_on_all_ranks(world, lambda: lock.share(peers) if world.rank == 0 else None)
    require_on_all_ranks(world, lambda: lock.share(peers) if world.rank > 0 else None)
    with require_on_all_ranks(
        world, lambda: components.checkpoints(settings.out.checkpoints, settings.recipe)
    ) as checkpoints:
        identity = RunIdentity.of(plan, settings.recipe, data.fingerprint)
        return TrainingLoop(plan, settings, world, data, identity, trainer, checkpoints, measuring, stop).run_to_end()


def _load_plan_and_join(
    settings: RunSettings, components: RunComponents, stop: StopRequest | None
) -> tuple[Plan, RankGroup]:
    """Load the plan, check what needs no other rank, and meet the other ranks."""
    with report_once_per_host(stop):
        plan, size = load_plan(settings.plan), int(os.environ.get("WORLD_SIZE", "1"))
        plan = replan_for(plan, size) if settings.elastic else plan
        require_runnable(plan.model, plan.layout, get_precision(plan.job.precision), plan.job.optimizer)
        require_world(plan, size)
        return plan, components.join(plan, settings.recipe, settings.device)


def _require_same_layout(layout: str, layouts: Sequence[str]) -> None:
    """Raise `InputError` if ranks have another layout than the first: each reads its plan, or searches it, by itself."""
    if layout != layouts[0]:
        raise InputError(
            f"the plan: found the layout {layout} here and {layouts[0]} on the first rank; the same plan and the same version of "
            "Shardwise are required on every host"
        )


def _check_rank(
    plan: Plan, settings: RunSettings, components: RunComponents, world: RankGroup, lock: RunLock
) -> RunData:
    """Run the checks of each rank."""
    if world.rank == 0:
        settings.out.require_output_folder(resume=settings.resume, force=settings.force)
        if settings.out.contains_run:
            lock.take()
    data = check_run(plan, settings)
    device, on_host = str(world.device), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = f" (this host over its {on_host} processes)" if device == "cpu" and on_host > 1 else ""
    require_memory(plan, settings.recipe, device_bytes(device, on_host), device + shared)
    return data


def _begin_run(plan: Plan, settings: RunSettings, data: RunData, lock: RunLock) -> None:
    """Take the folder's lock on the first rank, and create the folder of a new run."""
    lock.take()
    settings.out.require_output_folder(resume=settings.resume, force=settings.force)  # again, now that the lock is held
    if not settings.resume:
        settings.out.create(describe_run(plan, settings.recipe, data))


def _resume_hint(settings: RunSettings) -> str:
    """Describe the latest checkpoint of a run that ends now, and how to go on."""
    try:
        newest = latest(settings.out.checkpoints)
    except OSError:
        newest = None
    if newest is None:
        return "there is no checkpoint yet"
    return f"the latest checkpoint is {newest.name}; to go on: {settings.resume_command}"
