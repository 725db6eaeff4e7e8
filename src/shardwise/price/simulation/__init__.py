"""A step on simulated streams: the instruction list of every stage, kernel by kernel, and the pipeline schedule of its passes.

Instructions get the seconds of their prices (`unit_timings`), are put in the order of an engine or of an overlap
convention (`stage_passes`), and are played on one compute stream and one stream for each axis (`streams`). The seconds of the
passes then go through the clock of the pipeline schedule (`simulated_step`), from which the critical path and memory over time
are read off.

Entry points: `result.simulate`; `simulated_step.simulate_step` for a layout that is priced already. May import: what `price`
may, and `price` itself.
"""
