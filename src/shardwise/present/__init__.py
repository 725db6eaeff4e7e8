"""How people meet Shardwise: command line, Python functions, reports, charts and the explorer. Nothing here computes a price.

cli        the verbs; `cli.main` runs a command line
verbs      the functions of `import shardwise as sw`, from whose signatures the command line follows
reports    a report of each type of result; `rendering` writes reports as text, for terminals and for notebooks
charts     charts as values, and what draws them; `figures` are those of the books
explorer   the page on which a layout is changed by hand: its questions, its server, its files

The room may import every other, and no other imports it.
"""
