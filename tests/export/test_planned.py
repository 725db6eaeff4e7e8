"""What is planned under a stack is exported to its framework; what is not is refused with the nearest that it runs.

`benchmarks/export_check/planned.py` draws hundreds of each stack; these are the first of them.
"""

from __future__ import annotations

from itertools import islice

import pytest
from export.random_plans import Outcome, judge_problem, random_problems

from shardwise.interop.frameworks.targets import TARGETS

STACKS = tuple(dict.fromkeys(target.stack for target in TARGETS.values() if target.stack != "shardwise"))
MAX_PROBLEMS = 60  # nanotron runs few of the models


@pytest.mark.parametrize("stack", STACKS)
def test_pinned_plans_are_exported_or_refused_with_the_nearest(stack: str) -> None:
    """Until one plan has been exported."""
    outcomes: list[Outcome] = []
    for problem in islice(random_problems(stack, 1), MAX_PROBLEMS):
        outcomes.append(judge_problem(problem))
        assert outcomes[-1].kind in ("exported", "refused", "refused after", "full", "invalid"), (problem, outcomes[-1])
        if outcomes[-1].kind == "exported":
            return
    raise AssertionError(f"none of {MAX_PROBLEMS} problems is planned: {outcomes}")
