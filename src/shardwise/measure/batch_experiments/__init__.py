"""Experiments on the batch size: training runs side by side in one folder, each a process of `shardwise train`.

`batch_sweep.run_batch_sweep` trains at several batches to one loss, `checkpoint_branches.run_checkpoint_branches` goes on from a
checkpoint with several batches. The package may import `run` and all rooms below it.
"""
