"""What is measured of a run, and where it is kept: plain data, read without a framework."""
