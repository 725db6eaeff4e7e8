"""A step on simulated streams: the instruction list of every stage, kernel by kernel, and the schedule of its passes."""
