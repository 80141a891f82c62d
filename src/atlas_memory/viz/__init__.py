"""Pictures of runs: the report, and the dashboard."""
