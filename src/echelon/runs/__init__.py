"""A run's folder and what stands in it, without torch."""
