"""Reports of results: a function for each type of result returns a `rendering.report.Report`.

What is short and what is a detail, order, titles and sentences are decided here. Nothing here computes a price or parses an
argument.
"""
