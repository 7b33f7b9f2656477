"""One rank of a model as a library: what a step, an evaluation, a checkpoint is, without a run around it."""
