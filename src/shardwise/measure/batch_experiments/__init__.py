"""Experiments on the batch size: training runs side by side in one folder, each a process of `shardwise train`.

Entry points: `batch_sweep.run_batch_sweep` trains at several batches to one loss,
`checkpoint_branches.run_checkpoint_branches` continues a checkpoint with several batches. May import `run`, `search`
and all rooms below.
"""
