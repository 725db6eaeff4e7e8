"""An explanation as plain data: what `shardwise explain --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from shardwise.layout.layout import Layout
from shardwise.layout.payload import LayoutPayload
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.planning.explain.against import Against
from shardwise.planning.explain.options import Option
from shardwise.planning.explain.report import Explanation
from shardwise.planning.explain.story import RunnerUp
from shardwise.planning.explain.terms import Term
from shardwise.planning.payload import layout_of_plan
from shardwise.planning.plan import Plan
from shardwise.schema import Fields

SCHEMA = "shardwise.explain/3"
Payload = dict[str, Any]


class WithLayout(TypedDict):
    """The layout, as in every payload."""

    layout: LayoutPayload


class Explained(TypedDict):
    """Why a plan is what it is, in the order of its decisions, with the comparisons that were requested."""

    schema: Literal["shardwise.explain/3"]
    model: ModelPayload
    layout: LayoutPayload
    runners_up: list[Annotated[Payload, Fields(RunnerUp, WithLayout)]]
    options: list[Annotated[Payload, Fields(Option, WithLayout)]]
    against: Annotated[Payload, Fields(Against, WithLayout)] | None
    terms: list[Annotated[Payload, Fields(Term, WithLayout)]]


ExplainPayload = Annotated[Payload, Fields(Explanation, Explained)]


def explanation_payload(found: Explanation, plan: Plan) -> Payload:
    """The versioned payload of the explanation of a plan."""

    def laid(part: Mapping[str, Any]) -> Payload:
        return {**part, "layout": layout_of_plan(plan, Layout.parse(part["layout"]))}

    whole = laid(asdict(found))
    lists = {name: [laid(part) for part in whole[name]] for name in ("runners_up", "options", "terms")}
    against = laid(whole["against"]) if found.against else None
    return {"schema": SCHEMA, **whole, **lists, "model": model_payload(plan.model), "against": against}
