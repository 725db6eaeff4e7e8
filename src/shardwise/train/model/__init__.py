"""The model that is trained."""

from shardwise.train.model.decoder import Decoder, Output, build
from shardwise.train.model.gradients import IGNORED
from shardwise.train.model.initialise import initialise
from shardwise.train.model.weights import ParameterSpec, Weight, parameter_specs, parameter_weights

__all__ = [
    "IGNORED",
    "Decoder",
    "Output",
    "ParameterSpec",
    "Weight",
    "build",
    "initialise",
    "parameter_specs",
    "parameter_weights",
]
