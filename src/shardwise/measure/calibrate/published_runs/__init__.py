"""Training runs that others published, in `runs.csv`: one row a run, with its source, table, date and software.

`run_table` reads rows and their cells; `model_and_cluster_from_row` and `layout_from_row` turn cells into the
four values that an estimate takes; `prediction_from_row` joins and prices them. A file of more rows with these columns
can be read in place of `runs.csv`. Only `run_table` sees a measured column. May import `price`, `model`, `layout`,
`hardware` and below.
"""
