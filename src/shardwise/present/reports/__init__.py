"""Reports of results: a function for each type of result returns a `rendering.report.Report`.

What is short and what is a detail, order, titles and sentences are decided here. Nothing here computes a price or parses an
argument.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
