"""The model that is trained."""

from shardwise.data.batches import IGNORED
from shardwise.train.model.decoder import Decoder, Output, build
from shardwise.train.model.initialise import initialise
from shardwise.train.model.weights import Weight, parameter_weights

__all__ = [
    "IGNORED",
    "Decoder",
    "Output",
    "Weight",
    "build",
    "initialise",
    "parameter_weights",
]
