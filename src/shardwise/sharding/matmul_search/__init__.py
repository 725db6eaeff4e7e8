"""Cheapest way to compute a sharded product: an exact shortest path over the shardings of its tensors.

`cheapest_strategies` is the entry point; `numbered_shardings` has shardings and collectives as integers, `cheapest_paths`
Dijkstra's search over the shardings of one tensor, `local_products` the products of two tensors. The prices of collectives
and products are passed in. Imports the rest of `sharding` and `values`.
"""
