"""One run on one rank: its flags and checks, the loop over steps, and the instruments that watch them.

`worker` runs a rank from the checks to the end, `loop` its steps; `trainer` keeps its state from step to step, and
`training_engine` runs one optimizer step. `interfaces` has the protocols between them.
"""
