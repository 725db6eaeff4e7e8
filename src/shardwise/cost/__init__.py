"""What a layout costs: time and memory, as trees of terms, and the books' closed forms beside them."""
