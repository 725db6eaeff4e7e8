"""A plan compared with what ran it: every term predicted beside measured. Plain data to plain data; nothing here needs PyTorch.

`reconciliation.reconcile` compares a run with its plan, `rehearsal.compare_rehearsal` a rank that ran alone,
`trace_analysis.load_trace_analysis` a traced step: where the time of each rank went, what differs from the planned step, and
which change would help. The package may import `run` and all rooms below it."""
