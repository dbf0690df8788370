"""Who is in the run and where they stand: lineages, reports, groups, and how those behind catch up."""
