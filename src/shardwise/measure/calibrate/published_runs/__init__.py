"""Training runs that others published, in `runs.csv`: one row a run, each with its source, table, date and software.

The columns are those of the collection that the rows come from, so a file with more rows of it can be read in their place.
`facts` reads cells, `architecture`, `machine` and `training` turn them into the four values that an estimate takes, `case`
joins them, `predict` prices them. No module here but `rows` sees a measured column.
"""
