"""Evaluation and generation: models used without training them."""
