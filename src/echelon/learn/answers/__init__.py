"""Answers of a model to prompts: sampled, in conversations, and judged by rewards."""
