"""Products judged: emitted source run on JAX and PyTorch, and what XLA makes of the same product."""
