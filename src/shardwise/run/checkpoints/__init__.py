"""Checkpoints of a run: written in the background, complete or absent, and readable on any number of ranks and degrees.

A rank hands over its shards (boxes of named tensors) and plain values. A manifest with checksums, `checkpoint.json`,
says where each chunk of a tensor lies. A failure on one rank is raised on all.

Entry points: `Checkpointer` saves and restores the state of a run. `latest` finds the newest complete checkpoint;
`load` fills the shards of a state from one, and `load_tensors` reads the weights of one in a single process.

May import `values`, `records`, the reader of plan files, and of `run` the transport, the waits for other ranks and the
key of the batch ramp in a state.
"""

from shardwise.run.checkpoints.checkpointer import Checkpointer, RestoreResult
from shardwise.run.checkpoints.manifest import CheckpointState, Json, TensorShard
from shardwise.run.checkpoints.reader import load, load_tensors
from shardwise.run.checkpoints.step_folders import latest

__all__ = ["CheckpointState", "Checkpointer", "Json", "RestoreResult", "TensorShard", "latest", "load", "load_tensors"]
