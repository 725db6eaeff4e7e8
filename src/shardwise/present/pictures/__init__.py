"""Charts, tables and listings of the values of other rooms; a file for each kind of value.

A function takes a value (a plan, a simulation, a schedule) and returns a chart of `present.draw`, or, where its name begins with
`shown_`, the tables and charts that a notebook shows of it. `book_figures` has the figures of the books, `catalogue` what
`shardwise show` lists. May import every room and `present.draw`; not the command line, the Python functions or the explorer.
"""
