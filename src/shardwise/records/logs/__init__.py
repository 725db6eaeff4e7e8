"""Readers of training logs: `training_log.read_training_log` detects the framework and the kind of file, and reads the steps.

`frameworks` describes the logs of each framework; `tensorboard_events`, `wandb_history` and `protobuf` read files of
trackers; `steady_state` gives the median step without warm-up and outliers.
"""
