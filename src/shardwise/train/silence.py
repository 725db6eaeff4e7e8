"""Which ranks give no sign of life: what was received from each, and when, by the listener's clock. No input and no output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.train.waits import Activity

ENDED = -1  # the number of a rank's last sign of life


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life: its number (`ENDED`: the last one), what the rank does and since how many seconds."""

    number: int
    stage: str
    awaits: str
    for_s: float

    @classmethod
    def of(cls, number: int, doing: Activity, now: float) -> Beat:
        return cls(number, doing.stage, doing.awaits, now - doing.since)

    @classmethod
    def parse(cls, text: bytes) -> Beat:
        return cls(*json.loads(text))

    def dump(self) -> str:
        return json.dumps([self.number, self.stage, self.awaits, self.for_s])

    def __str__(self) -> str:
        return f"{self.stage}: {self.awaits}" if self.awaits else self.stage


@dataclass(slots=True)
class Listener:
    """What one rank has received from the others. A rank is silent when its last new sign of life is `silent_after_s` old.

    >>> listener = Listener(silent_after_s=30.0)
    >>> listener.hear({1: Beat(1, "step 5", "", 0.1)}, now=100.0)
    >>> listener.hear({1: Beat(1, "step 5", "", 0.1)}, now=140.0)
    >>> listener.silent(now=140.0)
    {1: 40.0}
    """

    silent_after_s: float
    beats: dict[int, Beat] = field(default_factory=dict)
    _heard: dict[int, float] = field(default_factory=dict)

    def hear(self, beats: Mapping[int, Beat], now: float) -> None:
        """What each of these ranks said last."""
        for rank, beat in beats.items():
            if rank not in self.beats or self.beats[rank].number != beat.number:
                self.beats[rank], self._heard[rank] = beat, now

    def begin_again(self, now: float) -> None:
        """This process has not run itself for a while: what it did not receive says nothing."""
        self._heard = dict.fromkeys(self._heard, now)

    def silent(self, now: float) -> dict[int, float]:
        """The ranks that are silent, and since how many seconds."""
        since = {rank: now - heard for rank, heard in self._heard.items() if self.beats[rank].number != ENDED}
        return {rank: seconds for rank, seconds in sorted(since.items()) if seconds >= self.silent_after_s}

    def reports(self, rank: int, now: float) -> bool:
        """Whether rank `rank`, whose listener this is, reports: all before it are silent."""
        silent = self.silent(now)
        return all(other in silent for other in range(rank))

    def to_hear(self, rank: int, size: int, now: float) -> list[int]:
        """Whom rank `rank` of `size` listens to: all others where it reports, else the first not silent and those before."""
        silent = self.silent(now)
        first = next((other for other in range(rank) if other not in silent), size)
        return [other for other in range(min(first + 1, size)) if other != rank]
