"""Presentation: command line, Python functions, reports, charts and the explorer. Nothing here computes a price.

verbs      the functions of `import shardwise as sw`, from whose signatures the command line follows (`verb`); `command_line.main`
           runs a command line, `mcp_server` answers agents
reports    a report of each type of result, by `registry`; `rendering` writes reports as text, for terminals and notebooks
charts     charts as values, and what draws them; `figures` are those of the books
explorer   the page on which a layout is changed by hand: its questions, its server, its files

The room may import every other, and no other imports it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
