"""Charts as values, and what draws them as SVG or with matplotlib.

`chart.Chart` is a chart as a value, `draw_chart.draw` draws any; `common_charts` and `*_charts` build them. Names that verbs,
reports and notebooks use are loaded when they are first used, so that `--help` loads no drawing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
