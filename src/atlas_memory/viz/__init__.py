"""Reports of runs (`atlas report`), comparisons, and the dashboard."""
