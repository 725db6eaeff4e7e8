"""Hostile requests: a clear 4xx for each, no traceback, nothing of this machine, and memory that stays where it was."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

import shardwise as sw
from shardwise.present.explorer.answer_workers import ExplorerAnswers
from shardwise.present.explorer.background_search import MAX_REPORTS, Searches
from shardwise.present.explorer.explorer import QUESTIONS, Explorer
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.request_guard import COOKIE, allowed_hosts
from shardwise.present.explorer.state import KEYS, State
from shardwise.present.explorer.web_server import application, bind_address
from shardwise.values.errors import InputError

HOST = "127.0.0.1:8631"
MOST_GROWTH = 200e6  # bytes that 200 hostile requests may leave behind
MOST_S = 20.0  # of any one of them


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = application(ExplorerAnswers(Explorer(NameResolver())), allowed_hosts("127.0.0.1", 8631))
    with TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=True) as connected:
        yield connected


HUGE = (
    "9" * 300, "1e308", "-1", "0", "nan", "inf", "1e15", "999999999999", "0x10", "1/0", "true", "[]", "{}", "null", "'; drop",
)  # fmt: skip
DEGREES = (
    "tp", "pp", "fsdp", "dp", "cp", "ep", "micro_batch_seqs", "num_virtual_stages", "recompute_layers", "layers_per_stage",
)  # fmt: skip
PATHS = (
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "page/../state.py", "etc/passwd", ".git/config",
    "index.html%00.js",
)  # fmt: skip
FILES = (
    "/etc/passwd", "/proc/self/environ", "..", "file:///etc/passwd", "http://10.0.0.1/x.toml", "x.toml", "config.json",
    "\\\\host\\share",
)  # fmt: skip
SIZES = (
    "num_layers", "d_model", "num_heads", "vocab_size", "num_experts", "d_ff", "head_dim", "name", "__class__", "numerics",
)  # fmt: skip


def hostile() -> Iterator[str]:
    """Paths with queries that no page sends."""
    for key in KEYS:
        yield from (f"/ask/overview?{key}={quote(value)}" for value in HUGE[:: 1 + len(key) % 3])
    for name in DEGREES:
        values = ("999999999", "-2", "1e9", "x", "1,1,1", "131072")
        yield from (f"/ask/overview?layout={name}={quote(value)}" for value in values)
    yield from (f"/{path}" for path in PATHS)
    yield from (f"/ask/{quote(name)}" for name in ("../overview", "__class__", "eval", "overview/x", "a" * 500))
    for key in ("model", "cluster", "stack", "precision"):
        yield from (f"/ask/overview?{key}={quote(name)}" for name in FILES)
    for field in SIZES:
        yield from (f"/ask/memory?model.{field}={quote(value)}" for value in ("999999999", "-1", "0", "x" * 600))
    for name in ("timeline", "schedule", "pareto"):
        yield from (f"/ask/{name}?cluster=h100:{size}" for size in ("10000000", "99999999999999", "0"))
    yield "/ask/overview?" + "&".join(f"k{number}=1" for number in range(500))
    yield "/ask/overview?" + "a" * 3000
    yield "/ask/overview?model=" + "%F0%28%8C%28"
    yield "/ask/why?term=" + quote("time.<script>alert(1)</script>")
    yield "/ask/copy?target=" + quote("$(touch /tmp/x)")


def test_two_hundred_hostile_requests_are_tried() -> None:
    assert len(set(hostile())) >= 200


def test_hostile_requests_get_a_clear_refusal(client: TestClient) -> None:
    client.get("/ask/overview")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for path in hostile():
        started = time.perf_counter()
        answer = client.get(path)
        assert time.perf_counter() - started < MOST_S, path
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, path
        assert "Traceback" not in answer.text
        assert "root:" not in answer.text
        if answer.status_code >= 400:
            assert json.loads(answer.text)["error"]["problems"], path
        else:
            json.loads(answer.text, parse_constant=pytest.fail)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MOST_GROWTH


def test_random_queries_get_an_answer_or_a_reason(client: TestClient) -> None:
    random_ = random.Random(0)
    words = [
        "1",
        "8",
        "64Ki",
        "1e30",
        "tp=8",
        "pp=4 fsdp=2",
        "h100:8",
        "tpu-v5p:4x4x4",
        "gpt-2",
        "none",
        "\u202e",
        "é" * 40,
        " ",
        "=",
        "tp==",
        "@0,1",
    ]
    for _ in range(60):
        pairs = [f"{random_.choice(KEYS)}={quote(random_.choice(words))}" for _ in range(random_.randint(1, 4))]
        question = random_.choice(list(QUESTIONS))
        answer = client.get(f"/ask/{question}?{'&'.join(pairs)}")
        assert answer.status_code in (200, 422), pairs
        assert "Traceback" not in answer.text


OTHER_HOSTS = (
    "evil.example",
    "127.0.0.1",
    "127.0.0.1:80",
    "localhost.evil.example:8631",
    "",
    "127.0.0.1:8631.evil.example",
)


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_other_host_names_are_refused(client: TestClient, host: str) -> None:
    assert client.get("/ask/overview", headers={"host": host}).status_code == 421
    assert client.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "https://127.0.0.1:8631"}, {"origin": "http://localhost:8631"},
     {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}],
)  # fmt: skip
def test_other_origins_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/ask/overview", headers=headers).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(client: TestClient, method: str) -> None:
    answer = client.request(method, "/ask/overview", content=b"x" * 100_000)
    assert answer.status_code == 405


def test_long_addresses_and_heads_are_refused(client: TestClient) -> None:
    assert client.get("/ask/overview?" + "a" * 5000).status_code == 414
    assert client.get("/ask/overview", headers={"x": "y" * 20_000}).status_code == 431


def test_every_answer_has_the_security_headers(client: TestClient) -> None:
    for answer in (
        client.get("/"),
        client.get("/ask/overview"),
        client.get("/nothing"),
        client.get("/", headers={"host": "x"}),
    ):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers


def test_off_loopback_a_token_is_required() -> None:
    app = application(ExplorerAnswers(Explorer(NameResolver())), allowed_hosts("10.0.0.5", 8631), token="secret")
    with TestClient(app, base_url="http://10.0.0.5:8631", follow_redirects=False) as client:
        assert client.get("/ask/overview").status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        assert client.get("/ask/overview", headers={"cookie": f"{COOKIE}=wrong"}).status_code == 401
        entered = client.get("/?token=secret")
        assert (entered.status_code, entered.headers["location"]) == (303, "/")
        assert "HttpOnly" in entered.headers["set-cookie"]
        assert client.get("/ask/overview").status_code == 200


def test_a_port_in_use_is_reported() -> None:
    first = bind_address("127.0.0.1", 0)
    port = first.socket.getsockname()[1]
    assert first.token is None
    with pytest.raises(InputError, match="--port 0"):
        bind_address("127.0.0.1", port)
    first.socket.close()


def test_an_answer_does_not_wait_for_an_acknowledgement() -> None:
    address = bind_address("127.0.0.1", 0)

    async def nodelay() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(connected, sock=address.socket):
            _, writer = await asyncio.open_connection(*address.socket.getsockname())
            has_nodelay = await accepted
            writer.close()
            await writer.wait_closed()
        return has_nodelay

    assert asyncio.run(nodelay())


def small() -> tuple[object, object, object]:
    """A model, a cluster and a job that are searched in no time."""
    return sw.load_model("gpt-2"), sw.load_cluster("h100:8"), sw.Job(global_batch_tokens=1 << 16, seq_len=1024)


def large() -> tuple[object, object, object]:
    """A model, a cluster and a job that are searched for several seconds."""
    job = sw.Job(global_batch_tokens=15360 * 4096, seq_len=4096)
    return sw.load_model("deepseek-v3"), sw.load_cluster("h100:16384"), job


def test_a_search_runs_once_in_a_process_of_its_own() -> None:
    searches, setting = Searches(), State(model="gpt-2")
    try:
        assert searches.ask(setting, small())["state"] == "searching"
        report = searches.wait(setting, small(), 120)
        assert report["state"] == "done"
        assert report["front"]
        assert searches.ask(setting, small()) is report
        assert searches.next_search is None
    finally:
        searches.close()
    assert searches.child is None


def test_a_search_that_takes_too_long_is_ended() -> None:
    searches = Searches(max_search_s=0.01)
    try:
        report = searches.wait(State(), small(), 60)
        assert report["outcome"] == "stopped"
        (problem,) = report["problems"]
        assert "took more than 0.01 s" in problem
        assert "whether a layout fits is not known" in problem
    finally:
        searches.close()


def test_a_search_whose_process_ends_says_that_and_how_many_layouts_it_priced() -> None:
    searches = Searches()
    try:
        searches.ask(State(), large())
        with searches.changed:
            assert searches.changed.wait_for(
                lambda: searches.results.get(State(), {}).get("num_priced") is not None, timeout=60
            )
        assert searches.child is not None
        searches.child.kill()
        report = searches.wait(State(), large(), 60)
        assert report["outcome"] == "stopped"
        (problem,) = report["problems"]
        assert "its process ended" in problem
        assert "took more than" not in problem
        assert 0 <= report["num_priced"] < report["num_candidates"]
        assert f"{report['num_priced']:,} of {report['num_candidates']:,} layouts were priced" in problem
    finally:
        searches.close()


def test_an_impossible_state_is_not_searched() -> None:
    searches = Searches()
    try:
        with pytest.raises(InputError):
            Explorer(NameResolver(), searches).answer("overview", "model=nothing")
        assert searches.next_search is None
        assert not searches.results
    finally:
        searches.close()


def test_results_are_kept_within_a_limit() -> None:
    searches = Searches()
    with searches.changed:
        for number in range(2 * MAX_REPORTS):
            searches._keep(State(batch_tokens=number + 1), {"state": "done"})
        assert len(searches.results) == MAX_REPORTS
    searches.close()
    assert not searches.thread.is_alive()
