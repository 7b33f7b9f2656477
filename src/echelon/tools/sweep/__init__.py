"""Hyperparameter sweeps: many runs of one recipe with different values, N at a time, and their results."""
