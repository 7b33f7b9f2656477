"""What a RayJob of KubeRay has beyond other kinds: the driver's files in the ConfigMap."""

import json
from dataclasses import asdict
from pathlib import Path

from echelon.ground.stored import read_text
from echelon.launch.job import JobSpec, count_gpus
from echelon.launch.kubernetes.pod import RECIPE_MOUNT, find_workdir
from echelon.launch.ray import driver
from echelon.launch.ray.driver import AGENT, ORDER, Order
from echelon.launch.ray.submission import DRIVER, render_agent


def render_pod_files(job: JobSpec) -> dict[str, str]:
    """The driver, its order, and the script of each machine; the ConfigMap has them beside the recipe."""
    fewest, most = job.nodes
    gpus = count_gpus(job)
    bundle = {"GPU": float(gpus)} if gpus else {"CPU": 1.0}
    wait, restarts = job.recipe.launch.ray.wait_seconds, job.recipe.fault.max_restarts
    order = Order(fewest, most, bundle, {}, wait, restarts, f"{RECIPE_MOUNT}/{AGENT}")
    return {
        DRIVER: read_text(Path(driver.__file__)),
        ORDER: json.dumps(asdict(order), indent=2) + "\n",
        AGENT: render_agent(job, Path(find_workdir(job))),
    }
