"""A run's folder is locked as long as one of its ranks lives."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from shardwise.run.faults.rank_status import Peer
from shardwise.run.folder_lock import RunLock, require_free
from shardwise.values.errors import InputError

HERE = socket.gethostname()


def this_process(rank: int = 0) -> Peer:
    return Peer(rank, HERE, os.getpid())


def test_a_folder_is_locked_by_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    require_free(folder)
    assert not folder.exists(), "asking makes nothing"
    with RunLock(folder) as lock, RunLock(folder) as second_lock:
        lock.take()
        lock.take()
        with pytest.raises(
            InputError, match=r"run is locked: a run goes on in it; wait for its end or stop it, or choose"
        ):
            second_lock.take()
        lock.share([this_process(), Peer(1, "elsewhere", 1)])
        with RunLock(folder) as rank:
            rank.share([])
            for refused in (second_lock.take, lambda: require_free(folder)):
                with pytest.raises(InputError) as error:
                    refused()
                named = f"rank 0 (process {os.getpid()} on {HERE}), rank 1 (process 1 on elsewhere)"
                assert f"a run goes on in it: {named}; wait" in str(error.value)
            lock.release()
            with pytest.raises(InputError, match="is locked"):
                second_lock.take()
        second_lock.take()
    require_free(folder)


def test_dead_processes_of_this_host_are_not_named(tmp_path: Path) -> None:
    gone = multiprocessing.get_context("spawn").Process(target=int)
    gone.start()
    gone.join()
    assert gone.pid is not None
    with RunLock(tmp_path) as lock:
        lock.take()
        lock.share([Peer(0, HERE, gone.pid), this_process(1), *(Peer(rank, "elsewhere", rank) for rank in range(2, 7))])
        with pytest.raises(InputError) as error:
            require_free(tmp_path)
    elsewhere = "rank 2 (process 2 on elsewhere), rank 3 (process 3 on elsewhere) and 3 more"
    assert f": rank 1 (process {os.getpid()} on {HERE}), {elsewhere}; wait" in str(error.value)


def test_a_shorter_list_replaces_a_longer_one(tmp_path: Path) -> None:
    for peers in ([this_process(rank) for rank in range(9)], [this_process()]):
        with RunLock(tmp_path) as lock:
            lock.take()
            lock.share(peers)
            with pytest.raises(InputError) as error:
                require_free(tmp_path)
    assert str(error.value).count("process") == 1


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with RunLock(tmp_path) as lock:
        lock.take()
        lock.share([this_process()])
    assert capsys.readouterr().err == (
        f"warning: the file system of {tmp_path} has no locks; nothing keeps another run out of the folder\n"
    )
