"""Whether a layout trains as one process does: a plan's own, on a model small enough for a few processes of a host."""
