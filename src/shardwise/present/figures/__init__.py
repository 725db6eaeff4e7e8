"""Figures of the books, drawn from our own numbers: rules, derivations and estimates.

`by_name.figure` returns one by name. `scaling_book` and `ultrascale_playbook` list each book's figures; the `*_charts` modules
make their charts, and `figures_page` writes the page beside the drawn files.
"""
