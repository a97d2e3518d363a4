"""Measurements: workloads, how they are timed, and records of real runs."""
