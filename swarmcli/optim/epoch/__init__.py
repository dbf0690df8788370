"""How an epoch ends: what a peer brings to the round, when that runs, and what it makes of the outcome."""
