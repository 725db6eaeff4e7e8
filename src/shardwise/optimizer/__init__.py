"""Optimizers: one file each; jobs, costs, recipes, engines and help read the table of them (`table`)."""
