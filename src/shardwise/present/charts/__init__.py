"""Charts as values, and what draws them as SVG or with matplotlib.

`draw_chart.draw_chart` draws any chart; `*_charts` build the charts of results.
"""
