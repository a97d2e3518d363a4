"""Measurements: workloads, providers, how they are timed, and records of real runs."""
