"""Turns requests into steps: scheduling, sampling, workloads and the log of what happened."""
