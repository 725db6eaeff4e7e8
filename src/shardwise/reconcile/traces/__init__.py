"""What the traces of a step say: where its time went on each rank, against the planned step, and what would mend it."""
