"""A decoder as one would write it by hand in PyTorch, with autograd: the judge of what the engine computes."""

from plain.decoder import Decoder, Output, build
from plain.initialise import initialise
from plain.weights import Weight, parameter_weights
from shardwise.run.data.batches import IGNORE_INDEX

__all__ = [
    "IGNORE_INDEX",
    "Decoder",
    "Output",
    "Weight",
    "build",
    "initialise",
    "parameter_weights",
]
