"""The trainer and what stands around it: metrics, evaluation, generation."""
