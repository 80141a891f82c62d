"""Synthetic benchmarks: tasks to train small models on, what untrained memories hold, and claims to be tried."""
