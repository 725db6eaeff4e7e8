"""The ranks that write and read a checkpoint together; a failure of one becomes a failure of all."""

from __future__ import annotations

import json
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.run.faults.rank_status import wait_for_ranks
from shardwise.run.transport.current import current_transport
from shardwise.run.transport.interface import TIMEOUT, CollectiveGroup
from shardwise.values import DamagedFileError, InputError

Result = TypeVar("Result")
LENGTH_BYTES = 8  # the length of a message, before its bytes
ERROR_TYPES: Mapping[str, type[Exception]] = {
    error_type.__name__: error_type for error_type in (InputError, DamagedFileError, ValueError, RuntimeError)
}


@dataclass(frozen=True, slots=True)
class CheckpointGroup:
    """All ranks of the job, over a gloo group of their own, or this process alone (no group).

    The group is shared with nothing else: collectives that a background thread and the training issue on one group
    would mix. It is gloo on GPUs too, since only JSON is sent. A wait for another rank that exceeds its timeout raises
    `LostRankError`.
    """

    group: CollectiveGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, timeout: timedelta = TIMEOUT) -> CheckpointGroup:
        """Return the group of all ranks of the job, which must all call this; a lone process has no group."""
        transport = current_transport()
        if transport.size == 1:
            return cls()
        with wait_for_ranks("the process group of checkpoints"):
            group = transport.host_group(timeout)
        return cls(group, transport.rank, transport.size)

    def all_gather(self, action: Callable[[], Result]) -> list[Result]:
        """Return the JSON value of `action` on each rank; if it fails on any, all raise.

        `InputError`, `DamagedFileError` and `ValueError` are raised as they are, `OSError` as an `InputError`, others
        as a `RuntimeError` with their traceback.
        """
        return _raise_failures([_decompress(packed) for packed in self._all_gather_bytes(self._pack_outcome(action))])

    def run_on_all(self, action: Callable[[], Result]) -> Result:
        """Return the value of `action` on this rank, of any type; if it fails on any rank, all raise."""
        results: list[Result] = []
        self.all_gather(lambda: results.append(action()))
        return results[0]

    def run_on_first(self, action: Callable[[], object]) -> None:
        """Run `action` on the first rank while all wait; if it fails, all raise."""

        def run() -> None:
            action()

        self.broadcast_from_first(run)

    def broadcast_from_first(self, action: Callable[[], Result]) -> Result:
        """Return the JSON value of `action` on the first rank; if it fails, all raise."""
        result: Result = self.scatter_from_first(lambda: [action()] * self.size)
        return result

    def gather_to_first(self, action: Callable[[], Result]) -> list[Result] | None:
        """Return the large JSON values of all ranks on the first rank, and None on others; if one fails, all raise."""
        gathered = self._gather_bytes(self._pack_outcome(action))

        self.run_on_first(lambda: _raise_failures([_decompress(packed) for packed in gathered or ()]))
        return None if gathered is None else [_decompress(packed)["found"] for packed in gathered]

    def scatter_from_first(self, action: Callable[[], Sequence[Any]]) -> Any:
        """Run `action` on the first rank and scatter its results, one JSON value per rank. If it fails, all raise."""
        messages: list[bytes] | None = None
        if self.rank == 0:
            outcome = _run_action(action, self.rank)
            results = outcome.get("found")
            messages = [
                _compress(outcome) if results is None else _compress({"found": result})
                for result in results or [None] * self.size
            ]
        return _raise_failures([_decompress(self._scatter_bytes(messages))])[0]

    def _pack_outcome(self, action: Callable[[], Any]) -> bytes:
        return _compress(_run_action(action, self.rank))

    def _all_gather_bytes(self, content: bytes) -> list[bytes]:
        if self.group is None:
            return [content]
        with wait_for_ranks("the other ranks' parts of a checkpoint"):
            local = _to_tensor(content, _max_length(len(content), self.group))
            gathered = local.new_empty(self.size * len(local))
            self.group.all_gather(gathered, local).wait()
        return [_from_tensor(part) for part in gathered.view(self.size, len(local))]

    def _gather_bytes(self, content: bytes) -> list[bytes] | None:
        if self.group is None:
            return [content]
        with wait_for_ranks("the other ranks' parts of a checkpoint"):
            local = _to_tensor(content, _max_length(len(content), self.group))
            parts = [torch.empty_like(local) for _ in range(self.size)] if self.rank == 0 else None
            self.group.gather(parts, local).wait()
        return None if parts is None else [_from_tensor(part) for part in parts]

    def _scatter_bytes(self, messages: list[bytes] | None) -> bytes:
        if self.group is None:
            assert messages is not None
            return messages[0]
        with wait_for_ranks("the first rank's part of a checkpoint"):
            max_length = _max_length(max(map(len, messages)) if messages else 0, self.group)
            received = torch.empty(LENGTH_BYTES + max_length, dtype=torch.uint8)
            padded = None if messages is None else [_to_tensor(message, max_length) for message in messages]
            self.group.scatter(received, padded).wait()
        return _from_tensor(received)


def _max_length(length: int, group: CollectiveGroup) -> int:
    longest = torch.tensor([length])
    group.all_reduce(longest, "max").wait()
    return int(longest)


def _run_action(action: Callable[[], Any], rank: int) -> dict[str, Any]:
    """Return the value of an action, or its failure, as a JSON value."""
    try:
        return {"found": action()}
    except Exception as error:
        translated = _translate_error(error)
        problems = translated.problems if isinstance(translated, InputError) else [str(translated)]
        return {"kind": type(translated).__name__, "problems": list(problems), "rank": rank}


def _translate_error(error: Exception) -> Exception:
    """Return an error of a type that callers expect."""
    if type(error) in (InputError, DamagedFileError, ValueError):
        return error
    if isinstance(error, OSError):
        prefix = f"{error.filename}: " if error.filename else ""
        return InputError(
            f"checkpoint: {prefix}{error.strerror}; a folder with room, and the permission to write in it, are required"
        )
    return RuntimeError("".join(traceback.format_exception(error)))


def _raise_failures(outcomes: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the values of actions; raise if any failed. An error that is not the user's is raised alone and first;
    otherwise all problems that users can mend are raised at once."""
    failures = [outcome for outcome in outcomes if "kind" in outcome]
    if not failures:
        return [outcome["found"] for outcome in outcomes]
    # What users cannot mend comes first: a bug would be hidden by the problems of other ranks.
    for failure in failures:
        if not issubclass(ERROR_TYPES[failure["kind"]], InputError):
            error = ERROR_TYPES[failure["kind"]](*failure["problems"])
            error.add_note(f"on rank {failure['rank']}")
            raise error
    damaged = all(failure["kind"] == DamagedFileError.__name__ for failure in failures)
    problems = dict.fromkeys(problem for failure in failures for problem in failure["problems"])
    raise (DamagedFileError if damaged else InputError)(*problems)


def _compress(outcome: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps(outcome).encode(), level=1)


def _decompress(content: bytes) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads(zlib.decompress(content))
    return outcome


def _to_tensor(content: bytes, max_length: int) -> Tensor:
    """Return a tensor of [LENGTH_BYTES + max_length] bytes: the length of the content, and the content."""
    framed = len(content).to_bytes(LENGTH_BYTES, "little") + content.ljust(max_length, b"\0")
    return torch.frombuffer(bytearray(framed), dtype=torch.uint8)


def _from_tensor(tensor: Tensor) -> bytes:
    framed = tensor.numpy().tobytes()
    return framed[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(framed[:LENGTH_BYTES], "little")]
