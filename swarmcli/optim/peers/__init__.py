"""Who is in the run and how far everyone is: the directory of reports, progress, and how those behind catch up."""
