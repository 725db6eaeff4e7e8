"""Ranks of a run that find, watch and lose each other.

`rank_status`: who a rank is and what it waits for; `rendezvous`: ranks meet through the store; `heartbeat`: the failure
detector; `exit_report`: which rank reports why the run ends; `agreement`: decisions of all ranks; `stop_request`:
SIGINT and SIGTERM. May import `values` and of `run` the transport and the recipe.
"""
