"""Readers of training logs: `training_log.read_training_log` detects the framework and the kind of file, and reads the steps.

`frameworks` describes the logs of each framework; `tensorboard_events` and `wandb_history` read files of trackers;
`training_log.measure_steady_state` gives the median step without warm-up and outliers.
"""
