"""How a rank ends that cannot go on: because another rank is lost, a disk is full, or by an error of its own.

The first one to leave reports why, and others, who lose it by that, end quietly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch.distributed as dist

from shardwise.run.faults.agreement import RankGroup
from shardwise.run.faults.heartbeat import HeartbeatMonitor
from shardwise.run.faults.rank_status import HeartbeatMessage, LostRankError, has_our_launcher
from shardwise.run.faults.rendezvous import LEFT_KEY, MISSING_KEY, Rendezvous, exit_as_lost, heartbeat_key
from shardwise.run.faults.stop_request import StopRequest
from shardwise.run.faults.torch_stores import Store
from shardwise.run.recipe import TrainingRecipe
from shardwise.values.errors import InputError, ShardwiseError

Found = TypeVar("Found")
MAX_SHOWN = 3  # ranks in a message


def record_exit(rendezvous: Rendezvous, code: int) -> None:
    """Say in the run's store that this rank ends with a code; why it says itself."""
    _ask_store(lambda: rendezvous.keys().compare_set(LEFT_KEY, "", json.dumps(code)), b"")


def exit_with_report(
    rendezvous: Rendezvous, error: LostRankError, resume_hint: str, *, store_is_silent: bool = False
) -> NoReturn:
    """End this rank, which has lost another: with the code of one that has said why it left; else only one of those left
    reports the loss.

    `resume_hint`: what is left of the run, and how to go on; `store_is_silent`: the store does not answer. Where our launcher has started the
    ranks, it reports, once it knows how each of them has ended.
    """
    problem = "; ".join(part for part in (str(error), resume_hint) if part)
    if not store_is_silent:
        keys = rendezvous.keys()
        exit_record = _ask_store(lambda: keys.get(LEFT_KEY) if keys.check([LEFT_KEY]) else b"", b"")
        if exit_record:
            raise SystemExit(json.loads(exit_record))
        other_ranks = _ask_store(lambda: _describe_other_ranks(rendezvous, keys, error.awaits), "")
        problem = "; ".join(part for part in (str(error), other_ranks, resume_hint) if part)
        _ask_store(lambda: exit_as_lost(keys, rendezvous.rank, problem), None)
    if rendezvous.rank == (0 if rendezvous.store_owner is None else 1) and not has_our_launcher():
        raise LostRankError(f"rank {rendezvous.rank}: {problem}")
    raise SystemExit(LostRankError.exit_code)


def _describe_other_ranks(rendezvous: Rendezvous, keys: Store, awaits: str) -> str:
    """The ranks that did not wait for the same when they last said what they did, and those that are silent since: what they
    waited for then may have had the same words in an earlier step."""
    *beat_texts, missing_text = keys.multi_get([*map(heartbeat_key, range(rendezvous.size)), MISSING_KEY])
    beats, missing = list(map(HeartbeatMessage.parse, beat_texts)), json.loads(missing_text)
    absent = (rank for rank in range(rendezvous.size) if beats[rank].awaits != awaits or rank in missing)
    absent_others = [rank for rank in absent if rank != rendezvous.rank]
    descriptions = [f"{rendezvous.peers[rank]} was last in {beats[rank]}" for rank in absent_others[:MAX_SHOWN]]
    return ", ".join(descriptions) + (
        f" and {len(absent_others) - MAX_SHOWN} more elsewhere" if len(absent_others) > MAX_SHOWN else ""
    )


def _ask_store(ask: Callable[[], Found], default: Found) -> Found:
    """What the store answers, if it still does."""
    try:
        return ask()
    except RuntimeError:
        return default


@contextmanager
def guard_run(
    world: RankGroup, recipe: TrainingRecipe, stop: StopRequest, resume_hint: Callable[[], str]
) -> Iterator[None]:
    """Around what the ranks do together.

    Ranks watch over each other meanwhile (`run.faults.heartbeat`). Where one ends with an error, one rank says so: that one, or,
    if it cannot, one of the others, with the report of `resume_hint`. Raises `InputError` for what the system refuses to write.
    """
    rendezvous = world.meeting if world.size > 1 else None
    if rendezvous is None:
        with _report_refused_writes(resume_hint):
            yield
        return
    silent_after_s, timeout_s = recipe.silent_after_s, recipe.timeout_s
    with HeartbeatMonitor(
        rendezvous, stop, silent_after_s=silent_after_s, timeout_s=timeout_s, remains=resume_hint
    ) as heartbeat:
        try:
            with _report_refused_writes(resume_hint):
                yield
        except (LostRankError, dist.DistError) as error:
            lost_error = error if isinstance(error, LostRankError) else LostRankError(str(error).splitlines()[0])
            exit_with_report(rendezvous, lost_error, resume_hint(), store_is_silent=heartbeat.store_is_silent)
        except BaseException as error:
            record_exit(rendezvous, _exit_code(error))
            raise


@contextmanager
def _report_refused_writes(resume_hint: Callable[[], str]) -> Iterator[None]:
    """Raises what the system refuses to write as an `InputError`."""
    try:
        yield
    except OSError as error:
        prefix = f"{error.filename}: " if error.filename else ""
        raise InputError(
            f"{prefix}{error.strerror or error}; a place with room, and the permission to write there, are required; {resume_hint()}"
        ) from error


def _exit_code(error: BaseException) -> int:
    """The exit code with which a rank ends that raises this."""
    if isinstance(error, ShardwiseError):
        return error.exit_code
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
