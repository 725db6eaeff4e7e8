"""Runs of two processes that are killed by SIGKILL at random moments, and resumed: do they end as those that were not?

    python benchmarks/kills.py [--kills 60] [--seed 0] [--layouts dp zero3 tp pp ep] [--out build/kills]

A tiny model in float64, under each layout: one run that is left alone, and one that is killed again and again, each time a rank,
all processes or the launcher, in a step, in a save or in the start, and then goes on with --resume. Its losses and norms have to
be those of the first run to the last bit. A copy of it goes on in another layout from where a kill had left it: there the first
steps have to be equal to 1e-10. Later ones are not: training at this rate is chaotic, and what rounding has changed grows tenfold
in some ten to twenty steps. What is done is kept in --out, and a command that is interrupted goes on with the layouts that are
missing.
Exit status 1 where a loss differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from shardwise.present.rendering.plain_text import render_block
from shardwise.present.rendering.report import Table

sys.path.pop(0)  # this folder, which has another `train`
sys.path.extend(str(Path(__file__).parents[1] / "tests" / folder) for folder in ("", "distributed"))
from train.float64 import SAME
from train.killing import LAYOUTS, Killable, draw_kills, largest_difference  # what the tests do in short

STEPS, CHECKPOINT_EVERY = 1000, 4
FIRST = 20  # steps in another layout that are compared


def killed_again_and_again(name: str, kills: int, seed: int, place: Path) -> dict[str, Any]:
    """A layout's run with so many kills, beside one that is left alone."""
    model, layout, moved_layout = LAYOUTS[name]
    uninterrupted, run = (
        Killable(place / label, model, layout, STEPS, CHECKPOINT_EVERY) for label in ("alone", "killed")
    )
    uninterrupted.ends()
    expected, counted, drafts, moved = uninterrupted.losses(), Counter[str](), 0, None
    for number, kill in enumerate(draw_kills(f"{name} {seed}", kills, STEPS)):
        begun = time.monotonic()
        assert run.killed(kill), f"{kill}: the run had ended before"
        counted[f"{kill.victim} {kill.moment}"] += 1
        losses, drafts = run.losses(), drafts + run.has_draft()
        equal = all(expected[step] == losses[step] for step in losses)
        print(f"{name} {number + 1}/{kills}: {kill}; died after step {max(losses, default=0)}, losses "
              f"{'equal' if equal else 'DIFFER'}, {time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip
        if number == kills // 2:
            moved = run.moved_to(moved_layout, place / "moved")
    run.ends()
    assert moved is not None
    moved.ends()
    begun = moved.first_step()
    first = range(begun + 1, begun + FIRST + 1)
    return {
        "layout": name, "kills": kills, "steps": STEPS, "same_bits": run.losses() == expected, "by": dict(counted),
        "half_written": drafts, "elsewhere": str(moved_layout),
        "furthest_elsewhere": largest_difference(moved.losses(), expected, first),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="of all layouts together (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--out", type=Path, default=Path("build/kills"))
    arguments = parser.parse_args()
    kills_per_layout = -(-arguments.kills // len(arguments.layouts))
    rows, fine = [("layout", "kills", "in a save", "losses to the last bit", "then in", "furthest there")], True
    for name in arguments.layouts:
        report = arguments.out / f"{name}-{kills_per_layout}-{arguments.seed}.json"
        if not report.exists():
            place = arguments.out.absolute() / "runs" / name
            shutil.rmtree(place, ignore_errors=True)
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(
                json.dumps(killed_again_and_again(name, kills_per_layout, arguments.seed, place), indent=2) + "\n"
            )
        result = json.loads(report.read_text())
        fine &= result["same_bits"] and result["furthest_elsewhere"] <= SAME
        rows.append(
            (name, str(result["kills"]), str(result["half_written"]), "equal" if result["same_bits"] else "differ",
             result["elsewhere"], f"{result['furthest_elsewhere']:.1e}")
        )  # fmt: skip
    print(render_block(Table(rows=tuple(rows), right=(1, 2, 5))))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
