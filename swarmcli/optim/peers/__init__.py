"""The peers of a run and how far they are: the directory of reports, progress, and how a peer catches up."""
