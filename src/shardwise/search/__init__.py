"""Every legal layout of a job, priced with arrays, and the best of them."""
