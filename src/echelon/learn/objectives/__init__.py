"""Training objectives: the losses that a run minimises."""
