"""Loss curves of small models on eight processes of this machine (tp, cp and fsdp, of experts ep too) beside those on one.

    python benchmarks/curves.py [STEPS] [--svg docs/pictures/curves.svg]

Text is the documents of this repository and some of Python's standard library; every run is `shardwise train`, in fp32. Prints
for each model the first and last loss and the largest differences of a step's loss and of its norm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardwise.present.charts.chart import Axis, Curve, Points
from shardwise.present.charts.common_charts import curve_chart
from shardwise.present.charts.draw_chart import draw

ROOT = Path(__file__).parents[1]
STEPS, VOCABULARY, MARKS = 200, 512, 25
LOSS = "loss_metrics/global_avg_loss"  # of a log's record
SIZES = {"num_layers": 2, "d_model": 64, "d_ff": 160, "vocab_size": VOCABULARY}
# Of each model its sizes, and how eight processes share it.
MODELS = {
    "tiny-llama-15m": (SIZES, "tp=2 cp=2 fsdp=2 zero_stage=3"),
    "tiny-moe-19m": ({**SIZES, "d_ff": 96}, "tp=2 cp=2 fsdp=2 ep=2 zero_stage=2"),
}
JOB = ["--batch-tokens", "2Ki", "--seq-len", "128", "--precision", "fp32", "--runnable"]
RECIPE = ["--learning-rate", "3e-3", "--warmup", "20", "--seed", "1", "--validate-every", "50"]


def shardwise(*words: str) -> None:
    """Run a verb as a user does."""
    subprocess.run([sys.executable, "-m", "shardwise", *words], check=True, stdout=subprocess.DEVNULL)


def run(
    model: str, sizes: dict[str, int], pins: str, processes: int, steps: int, folder: Path
) -> list[dict[str, float]]:
    """The log of a run, a record for each step."""
    out = folder / f"{model}-{processes}"
    changes = [word for name, size in sizes.items() for word in ("--set", f"model.{name}={size}")]
    pinned = [word for pin in pins.split() for word in ("--pin", pin)]
    plan = str(out.with_suffix(".json"))
    shardwise("plan", model, f"local:{processes}", *JOB, *changes, *pinned, "--out", plan)
    shardwise(
        "train",
        plan,
        "--data",
        str(folder / "data"),
        "--steps",
        str(steps),
        *RECIPE,
        "--out",
        str(out),
        "--device",
        "cpu",
    )
    records = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in records if LOSS in record]


def largest_difference(sharded: Sequence[dict[str, float]], single: Sequence[dict[str, float]], name: str) -> float:
    """The largest relative difference of a number over all steps that have it."""
    pairs = [
        (sharded_record[name], single_record[name])
        for sharded_record, single_record in zip(sharded, single, strict=True)
        if name in sharded_record
    ]
    return max(abs(measured - reference) / abs(reference) for measured, reference in pairs)


def main() -> None:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="?", type=int, default=STEPS)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    lines: list[Curve] = []
    marks: list[Points] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shardwise(
            "tokenize", str(ROOT / "docs"), "--glob", "*.md", "--python-library", "1MB", "--vocab-size", str(VOCABULARY),
            "--out", str(folder / "data"),
        )  # fmt: skip
        for model, (sizes, pins) in MODELS.items():
            eight = run(model, sizes, pins, 8, arguments.steps, folder)
            single = run(model, sizes, "", 1, arguments.steps, folder)
            losses = [record[LOSS] for record in eight]
            differences = {key: largest_difference(eight, single, key) for key in (LOSS, "grad_norm")}
            print(f"{model}, {pins}: loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")
            print(f"  largest relative differences: {differences}", flush=True)
            lines.append(Curve(label=f"{model}, {pins}", points=_points(eight)))
            marks.append(Points(label=f"{model}, one process", points=_points(single)[:: arguments.steps // MARKS]))
    if arguments.svg:
        arguments.svg.parent.mkdir(parents=True, exist_ok=True)
        arguments.svg.write_text(picture(lines, marks), encoding="utf-8")


def _points(records: Sequence[dict[str, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(record["step"]), record[LOSS]) for record in records)


def picture(lines: Sequence[Curve], marks: Sequence[Points]) -> str:
    """Losses over steps: lines of eight processes, marks of one."""
    title, subtitle = "Eight processes train as one does", "loss in fp32; lines: eight processes, marks: one"
    chart = curve_chart(title, subtitle, Axis(title="step"), Axis(title="nats per token", log=True), (*lines, *marks))
    return draw(chart).svg()


if __name__ == "__main__":
    main()
