"""A plan compared with a run of it: every term, predicted and measured. Nothing here needs PyTorch.

Entry points: `reconciliation.reconcile` compares a run with its plan, `reconciliation.compare_rehearsal` a rank that ran
alone, `trace_analysis.load_trace_analysis` a traced step: where the time of each rank went, what differs from the
planned step, and which change would help. May import `run`, `search` and all rooms below.
"""
