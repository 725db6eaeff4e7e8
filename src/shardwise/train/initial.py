"""Start a run from the weights of a stored model."""

from __future__ import annotations

from shardwise.interop.weights.stored_model import StoredModel
from shardwise.run.trainer.training_engine import TrainingEngine


def load_stored_weights(engine: TrainingEngine, stored: StoredModel) -> None:
    """Load a stored model into an engine, with the routers' biases if the files have them.

    A process reads only what it keeps."""
    engine.set_weights(lambda part: stored.read_flat(part.name, part.boxes()))
    for name, bias in engine.buffers():
        if name in stored.biases:
            bias.copy_(stored.bias(name))
