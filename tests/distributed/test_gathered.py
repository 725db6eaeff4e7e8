"""With ZeRO-3 weights are gathered one unit ahead and freed afterwards: how many layers' are present at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import training
from training import Case, engine_of, run_step

from shardwise.layout.layout import Layout
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.trainer.training_engine import TrainingEngine

NUM_LAYERS = 7
DEEP = {
    name: replace(training.MODELS[name], name=f"deep {name}", num_layers=NUM_LAYERS)
    for name in ("dense", "adapted", "predicting", "adapted predicting")
}


def layers_at_once(case: Case) -> list[int]:
    """Return the most layers with gathered weights in the forward and the backward pass; none remain afterwards."""
    training.MODELS |= {architecture.name: architecture for architecture in DEEP.values()}
    engine = engine_of(case)
    largest = [0]

    def look(_: object) -> None:
        largest[-1] = max(largest[-1], _whole_layers(engine))

    engine.observe(lambda: largest.append(0), look)
    run_step(engine, case, 0)
    assert _whole_layers(engine) == 0
    return largest


def _whole_layers(engine: TrainingEngine) -> int:
    layers = {group.group.path for group in engine.groups if group.splits_weights and group.is_gathered}
    return len({path for path in layers if path.startswith("layers.")})


@pytest.mark.thinned(2)
@pytest.mark.parametrize("model", DEEP)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_weights_of_two_layers_are_gathered_at_once(model: str, recompute: str) -> None:
    """The one that runs and the next one; of frozen weights nothing but the units' order says when they are done with."""
    layout = Layout(fsdp=2, zero_stage=3, micro_batch_seqs=4, recompute=recompute)
    assert run_rank_threads(layers_at_once, 2, Case(f"deep {model}", layout)) == [[2, 2], [2, 2]]
