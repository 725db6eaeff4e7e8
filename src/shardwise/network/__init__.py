"""Networks and what a collective takes on them: torus, switch, mesh of links, pods; closed forms, and messages hop by hop."""
