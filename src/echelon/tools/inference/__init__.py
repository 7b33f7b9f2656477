"""Evaluation and generation with a trained model."""
