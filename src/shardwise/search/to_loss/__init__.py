"""Plans to a loss: batch and devices searched together, what doubling them gains, tables and pictures."""
