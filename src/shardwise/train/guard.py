"""What ends a run that did not mean to end: another rank that is lost, a full disk, an error of this rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.errors import InputError, ShardwiseError
from shardwise.train.farewell import explained, leave_word
from shardwise.train.heartbeat import Heartbeat
from shardwise.train.parts import World
from shardwise.train.recipe import Recipe
from shardwise.train.stop import StopRequest
from shardwise.train.waits import LostRankError


@contextmanager
def guarded(world: World, recipe: Recipe, stop: StopRequest, remains: Callable[[], str]) -> Iterator[None]:
    """Around what the ranks do together.

    Ranks watch over each other meanwhile (`train.heartbeat`). Where one ends with an error, one rank says so: that one, or, if it
    cannot, one of the others, with the report of `remains`. Raises `InputError` for what the system refuses to write.
    """
    meeting = world.meeting if world.size > 1 else None
    if meeting is None:
        with _writing(remains):
            yield
        return
    silent_after_s, timeout_s = recipe.silent_after_s, recipe.timeout_s
    with Heartbeat(meeting, stop, silent_after_s=silent_after_s, timeout_s=timeout_s, remains=remains) as heartbeat:
        try:
            with _writing(remains):
                yield
        except (LostRankError, dist.DistError) as error:
            lost = error if isinstance(error, LostRankError) else LostRankError(str(error).splitlines()[0])
            explained(meeting, lost, remains(), deaf=heartbeat.is_deaf)
        except BaseException as error:
            leave_word(meeting, _code(error))
            raise


@contextmanager
def _writing(remains: Callable[[], str]) -> Iterator[None]:
    """Raises what the system refuses to write as an `InputError`."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise InputError(
            f"{where}{error.strerror or error}; a place with room, and the permission to write there, are required; {remains()}"
        ) from error


def _code(error: BaseException) -> int:
    """The exit code with which a rank ends that raises this."""
    if isinstance(error, ShardwiseError):
        return error.exit_code
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
