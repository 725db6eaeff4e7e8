"""The explorer as a service of many clients: slow ones, silent ones, large questions, and the addresses that it answers to."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from shardwise.present.explorer import answer_workers, http_connections
from shardwise.present.explorer.answer_workers import Answer, AnswerWorkers, ExplorerAnswers
from shardwise.present.explorer.background_search import SEARCHING, Values
from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.request_guard import COOKIE, allowed_hosts
from shardwise.present.explorer.session import open_session
from shardwise.present.explorer.state import State
from shardwise.present.explorer.web_server import application, bind_address, server_config
from shardwise.values import InputError

SMALL = "model=gpt-2&cluster=h100:8&batch_tokens=64Ki&seq_len=1024&layout=tp=2+fsdp=4"
HALF_OPEN = 80


class RecordedSearches:
    """Searches that never end; the settings that were asked about."""

    def __init__(self) -> None:
        self.settings: list[State] = []

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        assert values[0].name == setting.model
        self.settings.append(setting)
        return SEARCHING

    def last_report(self, setting: State) -> Mapping[str, Any] | None:
        return SEARCHING if setting in self.settings else None


@contextmanager
def serving(answers: answer_workers.Answers) -> Iterator[tuple[str, int]]:
    """Host and port of a server on loopback."""
    address = bind_address("127.0.0.1", 0)
    server = uvicorn.Server(server_config(answers, address))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.socket]}, daemon=True)
    thread.start()
    try:
        yield address.socket.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)


def ask(server: tuple[str, int], path: str) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(*server, timeout=60)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_half_open_connections_keep_nobody_out() -> None:
    with serving(ExplorerAnswers(Explorer(NameResolver()))) as server, ExitStack() as stack:
        ask(server, f"/ask/overview?{SMALL}")
        for number in range(HALF_OPEN):
            silent = stack.enter_context(socket.create_connection(server))
            if number % 2:
                silent.sendall(b"GET / HTTP/1.1\r\nHost: ")
        started = time.monotonic()
        assert ask(server, f"/ask/overview?{SMALL}")[0] == 200
        assert time.monotonic() - started < http_connections.MAX_HEAD_S


def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "MAX_HEAD_S", 0.3)
    with serving(ExplorerAnswers(Explorer(NameResolver()))) as server:
        for sent in (b"", b"GET /ask/overview HTTP/1.1\r\nHost: x\r\nX: "):
            with socket.create_connection(server, timeout=30) as connection:
                connection.sendall(sent)
                assert connection.recv(1) == b""
        with socket.create_connection(
            server, timeout=30
        ) as connection:  # after an answer, the next head has a deadline too
            host = f"{server[0]}:{server[1]}"
            connection.sendall(f"GET /store.js HTTP/1.1\r\nHost: {host}\r\n\r\nGET /".encode())
            while connection.recv(65536):
                pass


def test_of_too_many_half_open_connections_the_oldest_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "MAX_HALF_OPEN", 3)
    with serving(ExplorerAnswers(Explorer(NameResolver()))) as server, ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(server, timeout=30)) for _ in range(5)]
        for connection in silent[:2]:
            assert connection.recv(1) == b""
        assert ask(server, f"/ask/overview?{SMALL}")[0] == 200


def test_workers_answer_as_the_explorer_does_and_ask_for_searches() -> None:
    searches = RecordedSearches()
    workers = AnswerWorkers(NameResolver(), searches, num_workers=2)
    try:
        inside = ExplorerAnswers(Explorer(NameResolver(), searches))
        for question, query in (
            ("overview", SMALL),
            ("memory", SMALL),
            ("overview", "model=nothing"),
            ("batch", SMALL),
        ):
            assert workers.answer(question, query) == inside.answer(question, query)
        assert len(workers.idle) == 1  # the same one, with its caches
        assert len(searches.settings) == 6
        assert len(set(searches.settings)) == 1
    finally:
        workers.close()
    assert workers.answer("overview", SMALL).status == 503


def test_a_question_that_takes_too_long_is_stopped_and_the_next_one_answered() -> None:
    workers = AnswerWorkers(NameResolver(), RecordedSearches(), num_workers=1, max_answer_s=0.01)
    try:
        stopped = workers.answer("overview", SMALL)  # starting the process takes longer
        assert stopped.status == 503
        (problem,) = json.loads(stopped.text)["error"]["problems"]
        assert "took more than 0.01 s" in problem
        assert "not known" in problem
        workers.max_answer_s = 60
        assert workers.answer("overview", SMALL).status == 200
        (worker,) = workers.idle
        worker.kill()
        assert "its process ended" in workers.answer("overview", SMALL).text
        assert workers.answer("overview", SMALL).status == 200
    finally:
        workers.close()


def test_a_large_question_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    ask_worker = answer_workers.Worker.ask

    def ask_slowly(
        worker: answer_workers.Worker, question: str, query: str, searches: answer_workers.RunningSearches
    ) -> Answer:
        if question == "timeline":
            release.wait(60)
        return ask_worker(worker, question, query, searches)

    monkeypatch.setattr(answer_workers.Worker, "ask", ask_slowly)
    workers = AnswerWorkers(NameResolver(), RecordedSearches(), num_workers=2, max_answer_s=60)
    try:
        with serving(workers) as server:
            large = threading.Thread(target=ask, args=(server, f"/ask/timeline?{SMALL}"))
            large.start()
            assert ask(server, f"/ask/overview?{SMALL}")[0] == 200
            assert large.is_alive()
            release.set()
            large.join(60)
    finally:
        workers.close()


def test_numbers_without_an_end_and_errors_of_ours_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ExplorerAnswers(Explorer(NameResolver()))
    with TestClient(application(answers, allowed_hosts("127.0.0.1", 8631)), base_url="http://127.0.0.1:8631") as client:
        response = client.get("/ask/batch?tokens=1e308")
        assert response.status_code == 422
        assert "not finite" in response.json()["error"]["problems"][0]
        monkeypatch.setattr(answers.explorer, "answer", lambda question, query: {"number": float("nan")})
        assert client.get("/ask/overview").status_code == 422
        monkeypatch.setattr(answers.explorer, "answer", lambda question, query: [][0])
        response = client.get("/ask/overview")
        assert response.status_code == 500
        assert "IndexError" in response.json()["error"]["problems"][0]


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [("192.168.1.7:8631", True), ("[fe80::1]:80", True), ("localhost:9000", True), (f"{socket.gethostname()}:8631", True),
     ("evil.example:8631", False), ("1.2.3.4.evil.example", False), ("", False), ("[::1", False)],
)  # fmt: skip
def test_on_all_interfaces_any_address_of_this_machine_is_answered(host: str, is_answered: bool) -> None:
    app = application(ExplorerAnswers(Explorer(NameResolver())), allowed_hosts("0.0.0.0", 8631), token="secret")
    with TestClient(app, base_url="http://127.0.0.1:8631") as client:
        headers = {"host": host, "cookie": f"{COOKIE}=secret"}
        assert (client.get("/store.js", headers=headers).status_code == 200) == is_answered
        assert client.get("/store.js", headers={"host": "192.168.1.7:8631"}).status_code == 401


def test_an_address_on_all_interfaces_can_be_opened_elsewhere() -> None:
    address = bind_address("0.0.0.0", 0)
    address.socket.close()
    assert "0.0.0.0" not in address.url
    assert address.hosts.allows(address.url.split("/")[2])


def test_the_token_may_stand_beside_a_state() -> None:
    app = application(ExplorerAnswers(Explorer(NameResolver())), allowed_hosts("10.0.0.5", 8631), token="secret")
    with TestClient(app, base_url="http://10.0.0.5:8631", follow_redirects=False) as client:
        for query in (f"token=secret&{SMALL}", f"{SMALL}&token=secret"):
            entered = client.get(f"/?{query}")
            assert (entered.status_code, entered.headers["location"]) == (303, f"/?{SMALL}")
            client.cookies.clear()
        assert client.get("/?token=secret&token=wrong").status_code == 401
        assert client.get(f"/?token=secretmodel&{SMALL}").status_code == 401


@pytest.mark.parametrize(
    "text", [SMALL, f"?{SMALL}", f"http://127.0.0.1:8631/?{SMALL}", f"http://h:1/?token=T&{SMALL}#x"]
)
def test_a_state_may_be_pasted_with_its_address(text: str) -> None:
    assert open_session(None, None, text, host="127.0.0.1", port=0, opens_browser=False).query == SMALL
    with pytest.raises(InputError, match="query"):
        open_session(None, None, text.replace("model", "modle"), host="127.0.0.1", port=0, opens_browser=False)


def test_the_address_that_is_printed_accepts_connections() -> None:
    command = [sys.executable, "-m", "shardwise", "explore", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            host, _, port = process.stdout.readline().strip().removeprefix("http://").rstrip("/").partition(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(f"GET /store.js HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
                assert connection.recv(12) == b"HTTP/1.1 200"
        finally:
            process.terminate()
