"""The cheapest way to compute a sharded product: an exact shortest path over the shardings of its tensors.

`cheapest_strategies` is the entry point; `numbered_shardings` has shardings and collectives as integers, `cheapest_paths`
Dijkstra's search over those of one tensor, `local_products` where two tensors meet. The prices of collectives and products
are handed in. Imports the rest of `sharding` and `values`."""
