"""One rank under another launcher, with stubs for preparation and training: `stub_rank.py MODE`."""

import logging
import sys
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.ground.errors import ConfigError, EchelonError
from echelon.ground.logs import log_to_console
from echelon.ground.stored import write_json, write_text
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe
from echelon.recipe.render import render_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle import session
from echelon.run.lifecycle.setup import PreparedRun

RECIPE = Recipe.model_validate(
    {
        "run": {"name": "tiny", "dir": "run"},
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": "bytes",
        "data": {"train": "text.txt"},
        "train": {"steps": 10, "global_batch_size": 2},
        "optim": {"learning_rate": 1e-3, "warmup": 2},
    }
)


def prepare(recipe, fresh, find_cluster, variables, patience_seconds, announce):
    announce({})
    if sys.argv[1] == "refuse":
        raise ConfigError("data.train: text.txt is empty; give a file with text.")
    time.sleep(2)
    folder = RunFolder(Path("run"))
    folder.lock()
    plan = ParallelPlan(strategy="ddp", dp_replicate=2)
    write_json(folder.plan_path, plan.to_dict())
    write_text(folder.recipe_path, render_recipe(recipe))
    return PreparedRun(folder, plan)


def train(recipe, plan, folder, runtime, stop, heartbeat, callbacks=()):
    total = torch.ones(1)
    dist.all_reduce(total)
    logging.getLogger("echelon").info(f"rank {runtime.rank}: {int(total)} ranks trained {recipe.run.name}")


if __name__ == "__main__":
    log_to_console()
    session.prepare_run = prepare
    session.VISIBLE_SECONDS = 1.0
    sys.modules["echelon.run.lifecycle.rank_run"] = types.SimpleNamespace(run_training=train)
    try:
        sys.exit(session.train_as_rank(RECIPE, False).code)
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
