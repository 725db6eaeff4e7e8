"""The ranks that write and read a checkpoint together, and how a failure of one becomes the failure of all."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from shardwise.errors import InputError

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of the job, over a gloo group of their own; or this process alone (no group).

    The group is no other one's: collectives that a background thread and the training issue on one group would mix. It is
    gloo on GPUs too, since all that travels are names, sizes and sums.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """All ranks of the job, which must all call this; this process alone where no process group is initialised."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.new_group(backend="gloo"), dist.get_rank(), dist.get_world_size())

    def agree(self, action: Callable[[], Found]) -> list[Found]:
        """What `action` gives on each rank; where it fails on any, all raise.

        `InputError` and `ValueError` are raised as they are, `OSError` as an `InputError`, others as a `RuntimeError` with their
        traceback.
        """
        try:
            here: Found | _Failure = action()
        except Exception as error:
            here = _Failure(_known(error), self.rank)
            if self.group is None:
                raise here.error from error
        everywhere = [here] if self.group is None else self._gather(here)
        failures = [found for found in everywhere if isinstance(found, _Failure)]
        if failures:
            raise _joined(failures)
        return [found for found in everywhere if not isinstance(found, _Failure)]

    def on_first(self, action: Callable[[], None]) -> None:
        """Run `action` on the first rank; all wait for it, and fail where it fails."""
        self.agree(lambda: action() if self.rank == 0 else None)

    def _gather(self, here: Found | _Failure) -> list[Found | _Failure]:
        everywhere: list[Found | _Failure] = [here] * self.size
        dist.all_gather_object(everywhere, here, group=self.group)
        return everywhere


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception
    rank: int


def _known(error: Exception) -> Exception:
    """The error as one that travels between processes and that callers know."""
    if type(error) in (InputError, ValueError):
        return error
    if isinstance(error, OSError):
        return InputError(f"checkpoint: {error}; a folder with room, and the permission to write in it, are required")
    return RuntimeError("".join(traceback.format_exception(error)))


def _joined(failures: list[_Failure]) -> Exception:
    """All that users can mend, at once; before that, what they cannot."""
    for failure in failures:
        if not isinstance(failure.error, InputError):
            failure.error.add_note(f"on rank {failure.rank}")
            return failure.error
    problems = [
        problem for failure in failures if isinstance(failure.error, InputError) for problem in failure.error.problems
    ]
    return InputError(*dict.fromkeys(problems))
