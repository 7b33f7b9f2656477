"""Kubernetes jobs to launch, and the text of their recipe."""

from pathlib import Path

from echelon.launch.job import JobSpec
from echelon.launch.records import make_job
from tests.unit.recipe_samples import SMALL, load_text

NAME = "small-20260102-030405"
KUBERNETES = """\
launch:
  to: kubernetes
  nproc_per_node: 8
  kubernetes:
    image: registry.example/team/echelon:0.1
    volumes: [{mount: /data, claim: team-data}]
"""


def make_kubernetes_job(folder: Path, *overrides: str) -> JobSpec:
    recipe, _ = load_text(folder, SMALL + KUBERNETES, *overrides)
    return make_job(recipe, folder, NAME)
