"""How people meet Shardwise: the command line, the Python functions, charts, and the explorer. Nothing here computes a price.

cli         the verbs; `cli.main` runs a command line
api         the functions of `import shardwise as sw`
draw        kinds of chart as values, and what renders them: SVG, matplotlib, notebooks
pictures    charts, tables and listings of the values of other rooms
explore     the page on which a layout is changed by hand: its questions, its server, its files

The room may import every other, and none imports it but `draw.notebook`, which ten values inherit from to show themselves in a
notebook, and their charts in `pictures`.
"""
