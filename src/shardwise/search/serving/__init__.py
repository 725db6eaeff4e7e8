"""Search of serving layouts: which split of a model, how many instances and which batch limits serve a load within limits.

`candidates` lists the legal layouts and a ladder of concurrencies; all rows are estimated at once with NumPy columns.
`serving_search` keeps the rows that fit and meet the limits, and chooses; `serving_plan` is what it answers.
"""
