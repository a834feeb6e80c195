"""Analysis of runs: reports, studies, plans, drift. Nothing here runs inside a training step."""
