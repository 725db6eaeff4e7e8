"""Checkpoints of a run: written beside the training, complete or not there at all, and read on other ranks and degrees."""

from shardwise.train.checkpoint.checkpointer import Checkpointer, Restored
from shardwise.train.checkpoint.folders import latest
from shardwise.train.checkpoint.loading import load, whole
from shardwise.train.checkpoint.piece import Json, Piece, State

__all__ = ["Checkpointer", "Json", "Piece", "Restored", "State", "latest", "load", "whole"]
