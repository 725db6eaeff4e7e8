"""Charts as values, and what draws them as SVG or with matplotlib.

`chart.Chart` is a chart as a value, `draw_chart.draw` draws any; `common_charts` and `*_charts` build them.
"""
