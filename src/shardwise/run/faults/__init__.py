"""How the ranks of a run find, watch and lose each other.

`rank_status` says who a rank is and what it waits for, `rendezvous` brings the ranks together, `heartbeat` watches
them, `exit_report` says why a run ends, `agreement` lets ranks decide together, and `stop_request` takes SIGINT and
SIGTERM."""
