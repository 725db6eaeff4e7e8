"""How large a batch pays: the noise scale of the gradient, steps and tokens to a loss, learning rates, and batches that grow.

tradeoff        S(B) and E(B), the Pareto law, and what doubling a batch gains
noise_scale     a noise scale as a value: given, measured, or by a published law
estimators      the noise scale from norms of gradients
quadratic       the noise scale of a quadratic loss, exactly
learning_rate   the learning rate of another batch
growing         batches that follow the noise scale, B = sqrt(lambda · B_noise)
ramp            the batch of each step of a run, and the samples before it
schedule        how the batch changes in a run, as people write it
target          what it takes to reach a loss, with any batch
runs            the runs of a sweep over batches, as they are written
fit             least squares of S_min and E_min to such runs
branches        the critical batch from branches of a checkpoint; branch_files is how they are written

Sources: McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv 1812.06162); Stratos, Compute-Bound
Training, 2026 ("the note"), 2.2.1 and appendix E.
"""
