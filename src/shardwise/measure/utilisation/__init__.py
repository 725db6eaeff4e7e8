"""The share of the peak that a measured run reached, and where the rest of its step goes. Behind `shardwise mfu`.

Entry points: `measured_run.read_measured_log` reads a run from its log, `step_breakdown.compute_utilisation` gives its MFU
and HFU, and `step_breakdown.break_down_step` explains its step by the prediction of its layout."""
