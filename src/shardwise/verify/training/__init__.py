"""Training with a plan's layout compared with one process, on a model small enough for a few processes of a host.

Entry point: `plan_verification.verify_plan`. May import `run`, `search` and all rooms below, and torch in
`compare_runs`.
"""
