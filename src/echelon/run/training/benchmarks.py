"""Runs `evaluate.tasks` during training: benchmarks of lm-eval, on the ranks that train."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from echelon.learn.benchmarks.harness import TaskScores, open_tasks, quiet_harness
from echelon.learn.distributed.objects import broadcast_object
from echelon.recipe.batches import Rhythm
from echelon.run.training.evaluation_checks import TASKS

if TYPE_CHECKING:
    from echelon.learn.learner import Learner

_PASSES_PER_LOOK = 16  # a stop request waits for at most this many forward passes


class Benchmarks:
    """The tasks of a run, which are loaded once. Training goes on as if they had not run: see `Tasks.score`."""

    def __init__(self, learner: "Learner") -> None:
        """Find the tasks. Raises ConfigError as `open_tasks`."""
        self._learner = learner
        self._tasks = open_tasks(learner.recipe.evaluate.tasks, TASKS)

    @cached_property
    def rhythm(self) -> Rhythm:
        """The steps after which the tasks run."""
        return self._learner.recipe.task_rhythm(self._learner.data.train.num_samples)

    def run(self, look: Callable[[], None]) -> TaskScores:
        """Return the metrics of all tasks, the same on every rank. Collective.

        `look`: called now and then, on all ranks between the same passes. It may raise to end the run of the tasks.
        """
        from echelon.learn.benchmarks.harness_model import TrainingModel  # lm-eval is there

        learner, num_passes = self._learner, 0

        def before_pass() -> None:
            nonlocal num_passes
            num_passes += 1
            if num_passes % _PASSES_PER_LOOK == 0:
                look()

        with learner.engine.evaluation(learner.objective) as evaluation, quiet_harness():
            model = TrainingModel(learner, evaluation, before_pass)
            measured = self._tasks.score(model, learner.recipe.evaluate.tasks_limit, resamples=False)
        scores = broadcast_object(measured, learner.meshes.everyone)
        assert scores is not None, "the first rank has the results"
        return scores
