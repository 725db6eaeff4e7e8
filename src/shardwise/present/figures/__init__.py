"""Figures of the books, drawn from our own numbers: rules, derivations and estimates.

`figures_page.figure` returns one by name. `scaling_book` and `ultrascale_playbook` list each book's figures; the `*_charts`
modules make their charts, and `figures_page` writes the page beside the drawn files.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
