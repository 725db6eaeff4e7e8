"""Which ranks are silent, which rank reports it, and how a rank that lost another one ends; with a test clock and
store.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore, PrefixStore

from shardwise.run.faults.agreement import RankGroup
from shardwise.run.faults.heartbeat import FailureDetector, HeartbeatMonitor
from shardwise.run.faults.rank_exit import exit_with_report, guard_run, record_exit
from shardwise.run.faults.rank_status import (
    LAST_HEARTBEAT,
    LAUNCHER,
    HeartbeatMessage,
    LostRankError,
    Peer,
    mark_waiting,
    set_stage,
    wait_for_ranks,
)
from shardwise.run.faults.rendezvous import Rendezvous, heartbeat_key
from shardwise.run.faults.stop_request import StopRequest
from shardwise.run.recipe import TrainingRecipe
from shardwise.values.errors import InputError, NothingFitsError, OutputError


def beat(number: int, awaits: str = "", stage: str = "step 5") -> HeartbeatMessage:
    return HeartbeatMessage(number, stage, awaits, 0.5)


def test_a_rank_is_silent_when_its_last_news_is_old() -> None:
    listener = FailureDetector(30.0)
    listener.receive({0: beat(1), 1: beat(1)}, now=0.0)
    listener.receive({0: beat(2), 1: beat(1)}, now=20.0)
    assert listener.missing(29.0) == {}
    assert listener.missing(35.0) == {1: 35.0}
    listener.receive({1: beat(2)}, now=36.0)
    assert listener.missing(49.0) == {}
    assert listener.missing(70.0) == {0: 50.0, 1: 34.0}


def test_a_rank_that_has_ended_is_not_silent() -> None:
    listener = FailureDetector(30.0)
    listener.receive({1: beat(1), 2: beat(LAST_HEARTBEAT)}, now=0.0)
    assert listener.missing(100.0) == {1: 100.0}


def test_a_rank_that_was_paused_restarts_its_timeouts() -> None:
    listener = FailureDetector(30.0)
    listener.receive({1: beat(1)}, now=0.0)
    listener.reset(1000.0)
    assert listener.missing(1020.0) == {}
    assert listener.missing(1031.0) == {1: 31.0}


def test_the_first_that_is_not_silent_listens_to_all_and_others_to_those_before_them() -> None:
    """So the store answers one rank for all ranks, and the others for one each."""
    first, third = FailureDetector(30.0), FailureDetector(30.0)
    assert first.ranks_to_read(0, 4, now=0.0) == [1, 2, 3]
    assert third.ranks_to_read(2, 4, now=0.0) == [0]
    assert not third.is_reporter(2, now=0.0)
    third.receive({0: beat(1)}, now=0.0)
    assert third.ranks_to_read(2, 4, now=40.0) == [0, 1]
    third.receive({1: beat(1)}, now=40.0)
    assert not third.is_reporter(2, now=41.0)
    assert third.ranks_to_read(2, 4, now=80.0) == [0, 1, 3]
    assert third.is_reporter(2, now=80.0)


def test_signs_of_life_come_back_as_they_were_written() -> None:
    assert HeartbeatMessage.parse(beat(7, "AllReduce over dp").dump().encode()) == beat(7, "AllReduce over dp")


def meeting_of(rank: int, size: int = 4) -> Rendezvous:
    """Return the rendezvous of a rank whose peers have all come; none is silent yet."""
    peers, store = tuple(Peer(number, "node", 100 + number) for number in range(size)), HashStore()
    store.set_timeout(timedelta(seconds=5))  # a key that nobody has set
    PrefixStore("shardwise", store).set("silent", "[]")
    return Rendezvous(rank, peers, store)


class Watched:
    """A heartbeat whose threads do not run: what it says and with which code it ends its process is kept."""

    def __init__(self, rank: int = 0) -> None:
        self.reports: list[str] = []
        self.codes: list[int] = []
        self.stop = StopRequest()
        self.heartbeat = HeartbeatMonitor(
            meeting_of(rank), self.stop, TrainingRecipe(steps=1), remains=lambda: "this remains",
            report=self.reports.append, end=self.codes.append,
        )  # fmt: skip
        self.now = self.heartbeat._checked_at

    def hear(self, beats: dict[int, HeartbeatMessage]) -> None:
        self.heartbeat.detector.receive(beats, self.now)

    def pass_s(self, seconds: float) -> list[str]:
        """What is said as time goes by."""
        self.reports.clear()
        for _ in range(int(seconds)):
            self.now += 1.0
            self.heartbeat.check(self.now)
        return list(self.reports)


@pytest.fixture(autouse=True)
def _stage() -> Iterator[None]:
    set_stage("step 13")
    yield
    set_stage("the start")


def test_a_silent_rank_is_said_once_with_what_is_waited_for_and_so_is_that_it_is_back() -> None:
    watched = Watched()
    watched.hear({rank: beat(1) for rank in (1, 2, 3)})
    with mark_waiting("AllGather over fsdp (2 MB)"):
        assert watched.pass_s(29) == []
        watched.hear({1: beat(2), 3: beat(2)})
        assert watched.pass_s(25) == [
            "no sign of life for 30 s from rank 2 (process 102 on node); rank 0 waits in step 13: AllGather over fsdp (2 MB). "
            "The run goes on if it comes back, and ends where a wait lasts 600 s; SIGTERM ends it now"
        ]
        watched.hear({1: beat(3), 3: beat(3)})
        assert watched.pass_s(20) == []
        watched.hear({rank: beat(4) for rank in (1, 2, 3)})
        assert watched.pass_s(1) == ["rank 2 is back, after 74 s or more"]
    assert watched.codes == []


def test_what_another_rank_waits_for_is_said_where_this_one_does_not_wait() -> None:
    watched = Watched()
    watched.hear({1: beat(1), 2: beat(1, "AllReduce over dp", "step 14"), 3: beat(1)})
    watched.pass_s(20)
    watched.hear({2: beat(2, "AllReduce over dp", "step 14"), 3: beat(2)})
    (line,) = watched.pass_s(15)
    assert line.startswith(
        "no sign of life for 30 s from rank 1 (process 101 on node); rank 2 waits in step 14: AllReduce over dp."
    )


def test_silence_is_reported_once_some_rank_waits() -> None:
    watched = Watched()
    watched.hear({1: beat(1)})
    assert watched.pass_s(59) == []
    (line,) = watched.pass_s(1)
    assert "rank 0 is in step 13. The run goes on" in line


def test_many_silent_ranks_are_shortened_to_the_first() -> None:
    watched = Watched()
    watched.heartbeat.rendezvous = meeting_of(0, 9)
    watched.hear({rank: beat(1) for rank in range(1, 9)})
    with mark_waiting("x"):
        (line,) = watched.pass_s(31)
    assert "rank 1 (process 101 on node), rank 2 (process 102 on node), rank 3 (process 103 on node) and 5 more" in line


def test_others_say_nothing_as_long_as_a_rank_before_them_does() -> None:
    watched = Watched(rank=2)
    with mark_waiting("x"):
        for number in range(10):
            watched.hear({0: beat(number), 1: beat(1)})
            assert watched.pass_s(10) == []
        assert len(watched.pass_s(31)) == 1, "rank 0 is silent too, and now this one reports"


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("silent", [True, False])
def test_a_request_to_stop_ends_a_process_that_waits_for_a_silent_rank(waits: bool, silent: bool) -> None:
    watched = Watched()
    watched.hear({1: beat(1)})
    watched.stop.record_signal(signal.SIGTERM)
    with mark_waiting("AllReduce over dp") if waits else mark_waiting(""):
        for number in range(2, 8):
            if not silent:
                watched.hear({1: beat(number)})
            messages = watched.pass_s(10)
            if watched.codes:
                break
    assert bool(watched.codes) == (waits and silent)
    if watched.codes:
        assert watched.codes[0] == 143
        assert messages[-1] == (
            "stopped by SIGTERM while rank 0 waits in step 13: AllReduce over dp for rank 1 (process 101 on node): no checkpoint "
            "of it; this remains"
        )


@pytest.mark.parametrize("back", [False, True])
def test_a_silent_rank_that_a_request_to_stop_wakes_has_time_to_be_heard(back: bool) -> None:
    """A third of the time after which it is silent."""
    watched = Watched()
    watched.hear({1: beat(1)})
    with mark_waiting("AllReduce over dp"):
        for _ in range(4):
            watched.pass_s(10)
        watched.stop.record_signal(signal.SIGTERM)
        watched.stop.requested_at = watched.now
        watched.pass_s(9)
        assert not watched.codes
        if back:
            watched.hear({1: beat(2)})
        watched.pass_s(5)
    assert bool(watched.codes) != back


def test_ranks_that_do_not_report_end_quietly() -> None:
    watched = Watched(rank=1)
    watched.stop.record_signal(signal.SIGINT)
    watched.heartbeat._missing_elsewhere = True
    with mark_waiting("x"):
        for number in range(9):
            watched.hear({0: beat(number)})
            assert watched.pass_s(10) == []
    assert watched.codes[0] == 130


def test_a_rank_without_its_parent_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.pass_s(1)
    assert watched.stop.signal == 0
    monkeypatch.setattr(os, "getppid", lambda: 1)
    watched.pass_s(1)
    assert watched.stop.signal == signal.SIGTERM


def test_a_process_that_did_not_run_for_a_while_calls_nobody_silent() -> None:
    watched = Watched()
    watched.hear({1: beat(1)})
    with mark_waiting("x"):
        watched.now += 1000.0
        assert watched.pass_s(20) == []
        assert len(watched.pass_s(11)) == 1


@pytest.mark.parametrize(
    ("rank", "agent", "whose"),
    [(0, "True", "the launcher"), (1, "", "rank 0 (process 100 on node)"), (1, "True", None), (2, "", None)],
)
def test_a_store_that_does_not_answer_is_said_by_one_rank(
    rank: int, agent: str, whose: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    watched = Watched(rank)
    watched.heartbeat._request_started = watched.now - 40.0
    messages = watched.pass_s(3)
    assert [line.partition(",")[0] for line in messages] == (
        [f"no sign of life for 30 s from {whose}"] if whose else []
    )
    watched.stop.record_signal(signal.SIGTERM)
    with mark_waiting("x"):
        watched.pass_s(90)
    assert watched.codes[0] == 143, "with no store nobody can say who is silent"


def fail_waiting(awaits: str) -> LostRankError:
    with pytest.raises(LostRankError) as error, wait_for_ranks(awaits):
        raise RuntimeError("Connection closed by peer\nand a long story")
    return error.value


def end_with_report(meeting: Rendezvous, **more: Any) -> BaseException:
    with pytest.raises((LostRankError, SystemExit)) as ended:
        exit_with_report(meeting, fail_waiting("AllReduce over dp"), "this remains", **more)
    return ended.value


def test_the_first_that_has_lost_another_says_so_and_where_others_were() -> None:
    first, second = meeting_of(0, 3), meeting_of(1, 3)
    second = Rendezvous(1, second.peers, first.store)
    keys = PrefixStore("shardwise", first.store)
    for rank, awaits in enumerate(("AllReduce over dp", "AllReduce over dp", "")):
        keys.set(heartbeat_key(rank), beat(3, awaits, "step 12").dump())
    error = end_with_report(first)
    assert isinstance(error, LostRankError)
    assert str(error) == (
        "rank 0: step 13: AllReduce over dp failed after 0 s (Connection closed by peer); rank 2 (process 102 on node) was last "
        "in step 12; this remains"
    )
    quiet = end_with_report(second)
    assert isinstance(quiet, SystemExit)
    assert quiet.code == 4


def test_a_silent_rank_that_waited_for_the_same_in_an_earlier_step_is_named() -> None:
    meeting = meeting_of(0, 2)
    keys = PrefixStore("shardwise", meeting.store)
    keys.set(heartbeat_key(0), beat(9, "AllReduce over dp", "step 13").dump())
    keys.set(heartbeat_key(1), beat(3, "AllReduce over dp", "step 12").dump())
    keys.set("silent", "[1]")  # as the rank says that reports
    assert "rank 1 (process 101 on node) was last in step 12: AllReduce over dp" in str(end_with_report(meeting))


def test_ranks_that_lose_a_reported_rank_end_with_its_code() -> None:
    meeting = meeting_of(0, 2)
    record_exit(meeting, 2)
    record_exit(meeting, 3)
    quiet = end_with_report(meeting)
    assert isinstance(quiet, SystemExit)
    assert quiet.code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a.toml: unknown"), 2), (NothingFitsError("nothing fits"), 3), (OutputError("no room"), 1),
        (SystemExit(7), 7), (SystemExit(0), 0), (SystemExit("a text"), 1), (ValueError("a mistake"), 1), (KeyboardInterrupt(), 1),
        (OSError("no room"), 2),
    ],
)  # fmt: skip
def test_ranks_that_lose_a_failed_rank_end_with_its_code(error: BaseException, code: int) -> None:
    meeting = meeting_of(0, 2)
    world = cast(RankGroup, SimpleNamespace(size=2, rendezvous=meeting))
    with pytest.raises((type(error), InputError)), guard_run(world, TrainingRecipe(steps=1), StopRequest(), str):
        raise error
    quiet = end_with_report(Rendezvous(1, meeting.peers, meeting.store))
    assert isinstance(quiet, SystemExit)
    assert quiet.code == code


def test_under_our_launcher_the_launcher_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER, "1")
    meeting = meeting_of(0, 2)
    keys = PrefixStore("shardwise", meeting.store)
    for rank in range(2):
        keys.set(heartbeat_key(rank), beat(3, "AllReduce over dp").dump())
    assert isinstance(end_with_report(meeting), SystemExit)
    assert (
        keys.get("lost")
        == b"rank 0: step 13: AllReduce over dp failed after 0 s (Connection closed by peer); this remains"
    )


@pytest.mark.parametrize(
    ("rank", "agent", "reports"), [(0, "True", True), (1, "True", False), (1, "", True), (2, "", False)]
)
def test_without_a_store_only_one_rank_reports(
    rank: int, agent: str, reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    assert isinstance(end_with_report(meeting_of(rank, 3), store_is_silent=True), LostRankError) == reports


def test_a_wait_says_what_it_is_for_and_ends_as_a_lost_rank() -> None:
    from shardwise.run.faults.rank_status import activity

    with wait_for_ranks("AllGather over tp"):
        assert str(activity()) == "step 13: AllGather over tp"
    assert str(activity()) == "step 13"
    assert fail_waiting("AllGather over tp").awaits == "AllGather over tp"
    with pytest.raises(ValueError, match="of the caller"), wait_for_ranks("x"):
        raise ValueError("of the caller")
    assert str(activity()) == "step 13"


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def test_heartbeats_reach_each_other_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and all: two ranks in one process hear each other, and the end of one is no silence."""
    first, second = meeting_of(0, 2), meeting_of(1, 2)
    second = Rendezvous(1, second.peers, first.store)
    keys = PrefixStore("shardwise", first.store)
    for rank in range(2):
        keys.set(heartbeat_key(rank), beat(0).dump())
    keys.set("silent", "[]")
    reports: list[str] = []
    monkeypatch.setattr("shardwise.run.faults.heartbeat.HEARTBEATS_PER_TIMEOUT", 60_000)
    recipe = TrainingRecipe(steps=1, silent_after_s=3000.0, timeout_s=6000.0)
    beats = [
        HeartbeatMonitor(rank, StopRequest(), recipe, report=reports.append, end=reports.append)
        for rank in (first, second)
    ]
    with beats[0] as watcher:
        with beats[1]:
            until(lambda: watcher.detector.beats.get(1, beat(0)).number >= 3)
        until(lambda: watcher.detector.beats[1].number == LAST_HEARTBEAT)
    assert not reports


@pytest.mark.parametrize(("is_alive", "code"), [(True, 0), (False, 128 + signal.SIGTERM)])
def test_a_rank_whose_launcher_has_ended_already_ends(is_alive: bool, code: int) -> None:
    """Before it could ask to be told of the end of its parent; 2^22 is above any process id of Linux."""
    launcher = os.getpid() if is_alive else 2**22 + 1
    program = "from shardwise.run.faults.rank_status import end_with_parent; end_with_parent()"
    environment = {**os.environ, LAUNCHER: str(launcher)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == code
