"""Share of the peak that a measured run reached, and where the rest of its step goes; behind `shardwise mfu`.

Entry points: `measured_run.read_measured_log` reads a run from its log, `step_breakdown.compute_utilisation` returns
its MFU and HFU, `step_breakdown.break_down_step` explains its step by the prediction of its layout. May import `run`,
`search` and all rooms below.
"""
