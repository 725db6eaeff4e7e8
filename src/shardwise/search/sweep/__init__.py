"""Plans over a range: what is swept, the points of it, where scaling ends, pictures."""
