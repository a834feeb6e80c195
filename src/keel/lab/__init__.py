"""Analysis of runs: doctor, report, studies, plans. Nothing here runs inside a training step."""
