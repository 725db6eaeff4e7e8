"""Exit of a rank that cannot go on: another rank is lost, a disk is full, or it has an error of its own.

The first rank that ends reports why; others, which lose it, end quietly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch.distributed as dist

from shardwise.run.faults.agreement import RankGroup
from shardwise.run.faults.heartbeat import HeartbeatMonitor
from shardwise.run.faults.rank_status import HeartbeatMessage, LostRankError, has_our_launcher, join_first
from shardwise.run.faults.rendezvous import LEFT_KEY, MISSING_KEY, Rendezvous, exit_as_lost, heartbeat_key
from shardwise.run.faults.stop_request import StopRequest
from shardwise.run.faults.torch_stores import Store
from shardwise.run.recipe import TrainingRecipe
from shardwise.values import InputError, ShardwiseError, describe_error

Answer = TypeVar("Answer")


def record_exit(rendezvous: Rendezvous, code: int) -> None:
    """Record in the run's store that this rank ends with a code; it reports the reason itself."""
    _ask_store(lambda: rendezvous.keys().compare_set(LEFT_KEY, "", json.dumps(code)), b"")


def exit_with_report(
    rendezvous: Rendezvous, error: LostRankError, resume_hint: str, *, store_is_silent: bool = False
) -> NoReturn:
    """End this rank, which has lost another.

    It exits with the code of a rank that recorded its exit; else one of the remaining ranks reports the loss.
    `resume_hint` describes the latest checkpoint and how to go on; `store_is_silent`: the store does not answer. Under
    our launcher no rank reports: the launcher does, once it knows how each of them has ended.
    """
    problem = "; ".join(part for part in (str(error), resume_hint) if part)
    if not store_is_silent:
        keys = rendezvous.keys()
        # `left` is set by the first rank that ends with an error of its own, `lost` by the first that lost another.
        exit_record = _ask_store(lambda: keys.get(LEFT_KEY) if keys.check([LEFT_KEY]) else b"", b"")
        if exit_record:
            raise SystemExit(json.loads(exit_record))
        other_ranks = _ask_store(lambda: _describe_other_ranks(rendezvous, keys, error.awaits), "")
        problem = "; ".join(part for part in (str(error), other_ranks, resume_hint) if part)
        _ask_store(lambda: exit_as_lost(keys, rendezvous.rank, problem), None)
    # The store is gone: the first rank reports, or the second if the first had the store.
    if rendezvous.rank == (0 if rendezvous.store_owner is None else 1) and not has_our_launcher():
        raise LostRankError(f"rank {rendezvous.rank}: {problem}")
    raise SystemExit(LostRankError.exit_code)


def _describe_other_ranks(rendezvous: Rendezvous, keys: Store, awaits: str) -> str:
    """Describe the ranks that waited for something else in their last heartbeat, or are missing since. A missing rank
    is listed even if it waited for the same: the words may be those of an earlier step."""
    *beat_texts, missing_text = keys.multi_get([*map(heartbeat_key, range(rendezvous.size)), MISSING_KEY])
    beats, missing = list(map(HeartbeatMessage.parse, beat_texts)), json.loads(missing_text)
    absent = (rank for rank in range(rendezvous.size) if beats[rank].awaits != awaits or rank in missing)
    descriptions = [f"{rendezvous.peers[rank]} was last in {beats[rank]}" for rank in absent if rank != rendezvous.rank]
    return join_first(descriptions, " and {} more elsewhere")


def _ask_store(ask: Callable[[], Answer], default: Answer) -> Answer:
    """Return the store's answer, or a default when the store is gone."""
    try:
        return ask()
    except RuntimeError:
        return default


@contextmanager
def guard_run(
    world: RankGroup, recipe: TrainingRecipe, stop: StopRequest, resume_hint: Callable[[], str]
) -> Iterator[None]:
    """Watch the ranks while they work together, and report how the run fails.

    Heartbeats run meanwhile (`run.faults.heartbeat`). If a rank fails, one rank reports it: that one, or one of the
    others if it cannot, followed by the text of `resume_hint`. Raises `InputError` when the system refuses to write a
    file.
    """
    rendezvous = world.rendezvous if world.size > 1 else None
    if rendezvous is None:
        with _report_refused_writes(resume_hint):
            yield
        return
    heartbeat = HeartbeatMonitor(rendezvous, stop, recipe, remains=resume_hint)
    with heartbeat:
        try:
            with _report_refused_writes(resume_hint):
                yield
        except (LostRankError, dist.DistError) as error:
            lost_error = error if isinstance(error, LostRankError) else LostRankError(describe_error(error))
            exit_with_report(rendezvous, lost_error, resume_hint(), store_is_silent=heartbeat.store_is_silent)
        except BaseException as error:
            record_exit(rendezvous, _exit_code(error))
            raise


@contextmanager
def _report_refused_writes(resume_hint: Callable[[], str]) -> Iterator[None]:
    """Raise `OSError` as `InputError`, with the hint how to go on."""
    try:
        yield
    except OSError as error:
        prefix = f"{error.filename}: " if error.filename else ""
        raise InputError(
            f"{prefix}{error.strerror or error}; a place with room, and the permission to write there, "
            f"are required; {resume_hint()}"
        ) from error


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a rank that raises this error."""
    if isinstance(error, ShardwiseError):
        return error.exit_code
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
