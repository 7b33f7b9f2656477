"""A model on the tasks of EleutherAI's lm-eval."""
