"""Random plans with pins under every stack that a framework runs, each exported to that framework.

    PYTHONPATH=src:tests python benchmarks/export_check/planned.py [STACK ...] [--count 200] [--seed 0]

Prints, of each stack, how many plans were made and exported, how many problems were refused with the nearest plan, and each plan
that no framework of its stack exports, which ends the command with status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from export.random_plans import judge_problem, random_problems

from shardwise.interop.frameworks.targets import TARGETS

STACKS = tuple(dict.fromkeys(target.stack for target in TARGETS.values()))


def check(stack: str, count: int, seed: int) -> int:
    """Print the outcomes of random problems until so many are planned; return how many plans were not exported."""
    outcomes: Counter[str] = Counter()
    for problem in random_problems(stack, seed):
        outcome = judge_problem(problem)
        outcomes[outcome.kind] += 1
        if outcome.kind in ("lost", "unnamed"):
            print(f"{problem}\n    {outcome.text}", flush=True)
        if outcomes["exported"] + outcomes["lost"] >= count:
            break
    print(f"{stack}: {dict(outcomes)}", flush=True)
    return outcomes["lost"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stacks", nargs="*", metavar="STACK", help=f"of {', '.join(STACKS)}; all of them without one")
    parser.add_argument("--count", type=int, default=200, help="plans of each (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    return int(sum(check(stack, arguments.count, arguments.seed) for stack in arguments.stacks or STACKS) > 0)


if __name__ == "__main__":
    sys.exit(main())
