"""Run a plan: each rank executes the plan's instruction list and trains.

`numpy` executes it on virtual devices and counts every element that moves; `engine` executes it in PyTorch, kernel by
kernel without autograd. Around them are `data` (token shards and batches), `parallel` (sharded parameters and optimizer
state), `transport` (collectives), `trainer` (the training loop), `checkpoints`, and `faults` (ranks that are lost or
stopped).

Entry points: `trainer.worker.run_rank`, `launcher.run_ranks`, `trainer.training_engine.TrainingEngine`,
`trainer.rehearsal.rehearse_rank`, `data.corpus_writer.write_corpus`, and the command `python -m shardwise.train`.

May import every room up to and with `search`; not `interop`, `measure`, `verify` or `present`. PyTorch must not be
loaded at import by `recipe`, `machine_resources`, `launcher`, `folder_lock`, `faults.rank_status`,
`faults.stop_request`, `data`, or `trainer.{flags,preflight,batch_schedule,engine_prediction}`: input is checked and
threads are set before.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
