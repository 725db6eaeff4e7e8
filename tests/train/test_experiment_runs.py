"""The target `train` of experiments: real runs of a few steps, from the grid to the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.stand_in import write_inputs

from shardwise.measure import ExperimentRequest, run_experiment
from shardwise.measure.experiments.ledger import read_ledger
from shardwise.records.step_log import read_log

GRID = """
target = "train"
steps = 3
data = ["{data}"]
[problem]
model = "{model}"
cluster = "local:1"
batch_tokens = 64
seq_len = 16
precision = "fp32"
[layouts]
pins = {{ micro_batch_seqs = [1, 2] }}
"""


@pytest.mark.usefixtures("copied_attempts")
def test_configurations_are_trained_and_measured(tmp_path: Path) -> None:
    data = write_inputs(tmp_path)[2]
    model = Path(__file__).parents[2] / "examples" / "small-llama" / "config.json"
    grid, ledger = tmp_path / "grid.toml", tmp_path / "ledger.jsonl"
    grid.write_text(GRID.format(data=data, model=model), encoding="utf-8")
    status = run_experiment(ExperimentRequest(grid=grid, ledger=ledger, settings={"devices": "2"}), lambda text: None)
    assert status.states == {"done": 2}
    for row in read_ledger(ledger).rows.values():
        assert row.measurement is not None
        (log,) = tmp_path.glob(f"ledger.runs/{row.configuration.fingerprint}/attempt-1/run/log.jsonl")
        steps = read_log(log).steps
        assert [step.step for step in steps] == [1, 2, 3]
        assert row.measurement.num_steps == 3
        assert row.measurement.loss == steps[-1].loss
        assert min(s.step_time_s for s in steps) <= row.measurement.step_time_s <= max(s.step_time_s for s in steps)
        assert row.measurement.tokens_per_s_per_device == pytest.approx(64 / row.measurement.step_time_s, rel=1e-6)
