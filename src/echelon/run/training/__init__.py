"""The trainer, and its metrics, evaluations, saves and recovery from bad steps."""
