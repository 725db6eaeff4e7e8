"""An exported framework run, from its launch to the ledger: a stand-in takes the framework's command line and logs as it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shardwise.measure import ExperimentRequest, run_experiment
from shardwise.measure.experiments.ledger import LedgerRow, read_ledger

# What `accelerate launch` 1.15.0 and a script with transformers' TrainingArguments (5.24.0) did with the same files in a
# real run on two processes: the options of the launch, then the Trainer's own lines, the last of them a dictionary of texts.
STAND_IN = """
import sys
options = dict(zip(sys.argv[1:], sys.argv[2:]))
assert sys.argv[1:3] == ["launch", "--config_file"], sys.argv
config = dict(line.split(": ", 1) for line in open(sys.argv[3]).read().splitlines())
assert (config["num_processes"], config["distributed_type"]) == ("2", "MULTI_GPU"), config
assert sys.argv[4].endswith("/scripts/train.py") and options["--block_size"] == "64", sys.argv
if options["--per_device_train_batch_size"] == "8":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
steps, seconds = int(options["--max_steps"]), 0.25 * int(options["--max_steps"])
for step in range(1, steps + 1):
    print(f"\\r{{'loss': '5.559', 'grad_norm': '0.6031', 'learning_rate': '5e-05', 'epoch': '0.0{step}'}}", end="")
print(f"\\r{{'train_runtime': '{seconds:.4}', 'train_samples_per_second': '64', 'train_steps_per_second': '4', "
      "'train_loss': '5.555', 'epoch': '0.125'}")
"""
GRID = """
target = "accelerate"
steps = 6
start = "1s"
[problem]
model = "{model}"
cluster = "local:2"
batch_tokens = 1024
seq_len = 64
precision = "fp32"
[layouts]
pins = {{ dp = [2], micro_batch_seqs = [4, 8] }}
[environment]
PATH = "{path}"
TRAIN_DIR = "{folder}/scripts"
"""


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, LedgerRow]:
    """Two configurations that were run, by their micro-batch."""
    program = tmp_path / "bin" / "accelerate"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{STAND_IN}", encoding="utf-8")
    program.chmod(0o755)
    model = Path(__file__).parents[3] / "examples" / "small-llama" / "config.json"
    grid = tmp_path / "grid.toml"
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    grid.write_text(GRID.format(model=model, path=path, folder=tmp_path), encoding="utf-8")
    ledger = tmp_path / "ledger.jsonl"
    run_experiment(ExperimentRequest(grid=grid, ledger=ledger, settings={"devices": "4"}), report=lambda text: None)
    listed = read_ledger(ledger).rows.values()
    return {str(row.configuration.settings["layout"]).partition("micro_batch_seqs=")[2][:1]: row for row in listed}


def test_a_launch_of_accelerate_is_started_and_its_log_measured(rows: dict[str, LedgerRow]) -> None:
    done, failed = rows["4"], rows["8"]
    assert done.state == "done", done.line.reason
    assert done.measurement is not None
    assert (done.measurement.step_time_s, done.measurement.num_steps) == (0.25, 6)
    assert done.measurement.tokens_per_s_per_device == pytest.approx(1024 / 0.25 / 2)
    assert done.measurement.loss == 5.555
    assert (failed.state, failed.line.cause) == ("out of memory", "out of memory")
