"""A run's folder and its files, without torch."""
