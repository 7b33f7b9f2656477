"""One rank of a model as a library: what a step, an evaluation, a checkpoint is, without a run around it.

May import: ground, recipe, planner. It knows no run folder, no parent process, no signals and no environment.
"""
