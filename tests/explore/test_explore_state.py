"""A state and its address are one another; what is no state is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.present.explorer.background_search import SEARCHING
from shardwise.present.explorer.opened_plan import NameResolver, resolver_of_plan
from shardwise.present.explorer.request import resolve_request
from shardwise.present.explorer.state import MOST_CHARACTERS, VIEWS, State, parse_query, write_query
from shardwise.price import Problem
from shardwise.search.planner import make_plan
from shardwise.values.errors import InputError, ShardwiseError

POWERS = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(
    lambda tp, pp, fsdp, recompute: Layout.parse(f"tp={tp} pp={pp} fsdp={fsdp} recompute={recompute}"),
    POWERS, POWERS, POWERS, st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip
STATES = st.builds(
    State, view=st.sampled_from(VIEWS), batch_tokens=st.integers(1, 10**12), seq_len=st.integers(1, 10**7),
    tokens=st.none() | st.floats(1, 1e15), layout=st.none() | LAYOUTS, stack=st.none() | st.just("nemo-25"),
    changes=st.just(()) | st.just((("job.optimizer", "adamw"), ("model.num_layers", "40"))),
    details=st.just(()) | st.just((("term", "time.tp"),)),
)  # fmt: skip


@given(STATES)
def test_the_address_of_a_state_is_the_state(state: State) -> None:
    assert parse_query(write_query(state)) == state


def test_placements_travel_in_the_address() -> None:
    text = "tp=2 fsdp=4 placement=tp,cp,fsdp,dp,pp@0,1"
    state = State(layout=Layout.parse(text))
    assert "placement=tp,cp,fsdp,dp,pp@0,1" in write_query(state)
    assert parse_query(write_query(state)) == state


@pytest.mark.parametrize(
    ("query", "expected_text"),
    [
        ("bacth_tokens=1Mi", "batch_tokens"), ("view=admin", "one of overview"), ("layout=tp=0", "at least 1"),
        ("layout=tpp=2", "did you mean 'tp'"), ("batch_tokens=-1", "at least 1"), ("batch_tokens=nan", "found 'nan'"),
        ("seq_len=1e400", "finite"), ("model=a&model=b", "more than once"), ("model=a%00b", "printable"),
        ("model=%ff", "not UTF-8"), ("x" * (MOST_CHARACTERS + 1), "at most"), ("&".join(f"k{n}=1" for n in range(99)), "keys"),
        ("model.=3", "NAME=VALUE"),
    ],
)  # fmt: skip
def test_an_invalid_state_is_refused_with_the_reason(query: str, expected_text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_query(query)
    assert expected_text in str(caught.value)


@pytest.mark.parametrize(
    "query",
    [
        "model=/etc/passwd", "model=../../config.json", "model=config.json", "cluster=/etc/passwd.toml", "cluster=my.toml",
        "cluster=h100:9999999", "cluster=h100:0", "stack=nothing", "model.num_layers=100000", "model.num_heads=99999",
        "precision=int1", "model.name=", "job.loss=none",
    ],
)  # fmt: skip
def test_names_of_the_network_are_names_and_never_paths(query: str) -> None:
    with pytest.raises(ShardwiseError):
        resolve_request(parse_query(query), NameResolver())


def test_a_plan_opens_at_its_own_state() -> None:
    job = Job(global_batch_tokens=1 << 19, seq_len=4096)
    plan = make_plan(Problem(load_model("llama-3.2-1b"), load_cluster("h100:8"), job))
    resolver = resolver_of_plan(plan)
    assert (resolver.start.model, resolver.start.cluster, resolver.start.stack) == ("llama-3.2-1b", "h100:8", None)
    assert resolve_request(resolver.start, resolver).plan.estimate == plan.estimate


def test_a_plan_of_another_model_keeps_it_under_a_name_of_its_own() -> None:
    model = replace(load_model("llama-3.2-1b"), num_layers=20)
    plan = make_plan(
        Problem(model, load_cluster("h100:8", stack="nemo-25"), Job(global_batch_tokens=1 << 19, seq_len=4096))
    )
    resolver = resolver_of_plan(plan)
    assert (resolver.start.model, resolver.start.stack) == ("llama-3.2-1b@plan", "nemo-25")
    again = resolve_request(parse_query(write_query(resolver.start)), resolver)
    assert again.model.num_layers == 20
    assert again.plan.estimate.step_time_s == plan.estimate.step_time_s


def test_a_state_without_a_batch_has_the_usual_job_of_its_model() -> None:
    request = resolve_request(parse_query("model=gpt-2&cluster=h100:8"), NameResolver())
    assert (request.job.global_batch_tokens, request.job.seq_len) == (1 << 19, 1024)
    assert "batch_tokens=512Ki&seq_len=1024" in write_query(request.state)
    assert request.layout_source == "fallback"


def test_the_layout_is_the_one_of_the_address_or_the_best_that_was_found() -> None:
    state = parse_query("model=gpt-2&cluster=h100:8")
    search = {**SEARCHING, "state": "done", "outcome": "found", "best": {"layout": "dp=8"}}
    best = resolve_request(state, NameResolver(), search)
    assert (best.layout, best.layout_source) == (Layout.parse("dp=8"), "search")
    chosen = resolve_request(replace(state, layout=Layout.parse("fsdp=8")), NameResolver(), search)
    assert (chosen.layout, chosen.layout_source) == (Layout.parse("fsdp=8"), "address")


def test_the_usual_batch_is_a_whole_number_of_sequences() -> None:
    job = resolve_request(parse_query("model=opt-175b&cluster=h100:512"), NameResolver()).job
    assert (job.seq_len, job.global_batch_tokens) == (2050, 2047 * 2050)
