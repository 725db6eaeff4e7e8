"""PyTorch kernels of the engine: attention, experts, products, norms, loss, optimizers. No collectives.

Functions of tensors, and small classes that keep options. May import `run.data.batches` (one constant), `step`,
`sharding`, `model` and `values`.
"""
