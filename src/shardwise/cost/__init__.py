"""What a layout costs: time and memory, as trees of terms."""
