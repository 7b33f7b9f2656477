"""Builds ranks of a plan without devices, each in a process of its own: `python -m echelon.run.lifecycle.plan_build`.

The process reads a JSON request from stdin and writes one JSON answer to stdout.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TextIO

import yaml

from echelon.ground.errors import ConfigError, EchelonError, PlanError
from echelon.planner.memory_parts import StoredBytes
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe
from echelon.recipe.load import build_recipe
from echelon.recipe.render import render_recipe

_MARK = "built: "
_AT_ONCE = 2


def build_stages(recipe: Recipe, shape: ModelShape, plan: ParallelPlan) -> dict[int, StoredBytes]:
    """Return the bytes that a rank of the first and of the last pipeline stage stores, by stage, counted from 0.

    Without a pipeline there is one stage. Of the ranks of a stage it is the first, whose part is the largest where a
    tensor does not divide.

    Raises:
        ConfigError: the model cannot be divided as planned.
        PlanError: a process failed; the message is its last line.
    """
    common = {"recipe": render_recipe(recipe), "vocab_size": shape.vocab_size, "plan": plan.to_dict()}
    stages = sorted({0, plan.pp - 1})
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        built = pool.map(_build_apart, [{**common, "stage": stage} for stage in stages])
        return dict(zip(stages, built, strict=True))


def _build_apart(request: dict[str, Any]) -> StoredBytes:
    command = [sys.executable, "-m", "echelon.run.lifecycle.plan_build"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    answers = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        last = next(iter(done.stderr.strip().splitlines()[::-1]), f"exit status {done.returncode}")
        raise PlanError(f"--build: stage {request['stage']} of the plan could not be built: {last}")
    answer = json.loads(answers[-1])
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return StoredBytes(**answer)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Build the first rank of the request's stage; return its bytes, or the message why it is refused."""
    from echelon.learn.distributed.mesh import Grid
    from echelon.learn.engines.native_build import build_rank
    from echelon.learn.model.build import apply_head, load_config

    recipe, _ = build_recipe(yaml.safe_load(request["recipe"]))
    plan = ParallelPlan.from_dict(request["plan"])
    source = recipe.model.config or recipe.model.checkpoint
    assert source is not None, "a recipe has a model"
    try:
        config = load_config(source, recipe.model.trust_remote_code)
        config.vocab_size = request["vocab_size"]
        apply_head(config, recipe)
        grid = Grid(plan)
        rank = next(number for number in range(plan.world_size) if grid.place(number)["pp"] == request["stage"])
        return asdict(build_rank(recipe, config, plan, rank))
    except EchelonError as error:
        return {"refused": str(error)}


def main(stdin: TextIO = sys.stdin) -> None:
    """Answer the request on stdin."""
    sys.stdout.write(f"{_MARK}{json.dumps(answer(json.load(stdin)))}\n")


if __name__ == "__main__":
    main()
