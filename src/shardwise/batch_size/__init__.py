"""Batch sizes that pay: the noise scale of the gradient, steps and tokens to a loss, learning rates, and batches that grow.

  tradeoff          S(B) and E(B), the Pareto law, what doubling a batch gains, and a loss as a target
  noise_scale       a noise scale as a value: given, measured, or by a published law
  noise_estimators  the noise scale from norms of gradients, with an interval, and as a running average
  hessian_noise     the full noise scale, from products with the Hessian; exact for a quadratic loss
  run_noise         the noise scale that a run measured, from its log
  learning_rate     the learning rate of another batch
  growing_batch     batches that follow the noise scale, B = sqrt(lambda · B_noise)
  batch_schedule    how the batch changes in a run: by tokens seen, or by step
  batch_sweep_fit   the runs of a sweep over batches, and the law fitted to them
  branch_losses     the critical batch from branches of a checkpoint
  json_rows         rows of JSON in which every wrong number is named by its place
  payloads          what `shardwise batch --json` prints

Entry points: `run_noise.run_noise`, `noise_scale.parse_noise_scale`, `tradeoff.LossTarget`, `batch_sweep_fit.fit_tradeoff`,
`batch_schedule.parse_batch_schedule`. May import `values` and `records`. Nothing here imports torch.

Sources: McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv 1812.06162); Stratos, Compute-Bound
Training, 2026 ("the note"), 2.2.1 and appendix E.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
