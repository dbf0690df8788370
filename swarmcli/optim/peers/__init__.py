"""The peers of the run and how far they are: the directory of reports, progress, and how those behind catch up."""
