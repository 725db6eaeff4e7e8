"""Networks, and the time that each collective takes on them: a torus of direct links, pods of it, tiers of switches.

`topology` has the networks and the links of groups of a layout's axes, `collective_times` the algorithms of a collective and
their times, `message_simulation` carries collectives out hop by hop. Imports `values` and `sharding`.
"""
