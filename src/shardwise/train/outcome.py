"""How the ranks of a run on this machine have ended: what the launcher reports, and which of them are lost."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwise.errors import ShardwiseError
from shardwise.train.stop import SIGNALS, exit_code
from shardwise.train.waits import LostRankError

# How long ranks that are asked to stop may take for the step that they are in and its checkpoint, before they are killed.
STOP_S = 600.0
INPUT = (2, 3)  # codes with which a rank has said what is wrong with the input
LOST = LostRankError.exit_code
STOPPED, ENDED = (
    tuple(exit_code(one) for one in SIGNALS),
    tuple(-one for one in SIGNALS),
)  # by a handler, and without one


class RunEndedError(ShardwiseError):
    """Ranks have ended, and none of them could say why."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """The exit code of each rank, as `subprocess` has it; the ranks that hung and were `killed` by the launcher; the signal by
    which the launcher was `asked` to stop, or 0; `word`: what ranks said that had lost another, which may be named already.

    >>> outcome = Outcome({0: LOST, 1: -signal.SIGKILL})
    >>> outcome.lost, outcome.can_go_on
    ((1,), True)
    """

    codes: Mapping[int, int]
    killed: Collection[int] = ()
    asked: int = 0
    word: str = ""

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that a signal has ended that is no request to stop, and those that hung."""
        signalled = (rank for rank, code in self.codes.items() if code < 0 and code not in ENDED)
        return tuple(sorted({*signalled, *self.killed}))

    @property
    def can_go_on(self) -> bool:
        """Whether the run has ended only because some of its ranks were lost, or the connections between them."""
        said = any(code in INPUT for code in self._own.values())
        if self.asked or said or len(self.lost) == len(self.codes):
            return False
        return bool(self.lost) or (LOST in self._own.values() and not self._unsaid)

    def code(self) -> int:
        """The code of a rank that has said what is wrong with the input, or of the signal by which the run was stopped; 0.

        Raises `RunEndedError` for ranks that ended without a word, `LostRankError` where ranks have lost each other.
        """
        said = [code for code in self._own.values() if code in INPUT]
        if said:
            return said[0]
        if self._unsaid:
            raise RunEndedError(*(_how(rank, code) for rank, code in self._unsaid.items()))
        if LOST in self._own.values():
            raise LostRankError(self.word)
        if self.killed and not self._own:
            late = ", ".join(map(str, sorted(self.killed)))
            raise RunEndedError(f"ranks {late} had not ended {STOP_S:g} s after the others, and were killed")
        stopped = [code if code > 0 else exit_code(-code) for code in self._own.values()]
        return exit_code(self.asked) if self.asked and stopped else next(iter(stopped), 0)

    @property
    def _own(self) -> dict[int, int]:
        """The codes, but 0, of the ranks that ended by themselves."""
        return {rank: code for rank, code in sorted(self.codes.items()) if code and rank not in self.killed}

    @property
    def _unsaid(self) -> dict[int, int]:
        """Those of the ranks that ended without a word."""
        return {rank: code for rank, code in self._own.items() if code not in (*INPUT, LOST, *STOPPED, *ENDED)}


def _how(rank: int, code: int) -> str:
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
    return f"rank {rank} ended with {how}{hint}"
