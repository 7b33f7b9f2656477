"""Refuse secrets in launched recipes: they are stored in plain text, on this machine and at the target."""

from echelon.ground.errors import ConfigError
from echelon.recipe import Recipe
from echelon.recipe.launch_sections import Target
from echelon.recipe.render import find_secret_keys

# How to pass a secret to the processes of each target without submitting it.
_WAYS: dict[Target, str] = {
    "local": "set it as an environment variable of `echelon launch`; the job inherits it",
    "torchrun": "keep it in a file on each machine, and read it in launch.setup: `NAME=$(cat FILE)`, `export NAME`",
    "slurm": "set it as an environment variable of `echelon launch`, which sbatch passes on, or read it in "
    "launch.setup from a file that only you can read: `NAME=$(cat FILE)`, `export NAME`",
    "kubernetes": "put it into a Secret of the cluster, and name the Secret in launch.kubernetes.env_from_secrets or "
    "launch.kubernetes.volumes",
    "sagemaker": "store it in AWS Secrets Manager, and name it in launch.sagemaker.secrets: `{HF_TOKEN: <ARN>}`",
}


def refuse_secrets(recipe: Recipe) -> None:
    """Raise ConfigError for the first value that looks like a secret; the message has its key and no part of it.

    Checks the whole recipe: scripts and requests are made from it, and the job trains from a copy in which secrets
    are redacted. `launch.to` must be set.
    """
    assert recipe.launch.to is not None
    for key in find_secret_keys(recipe):
        raise ConfigError(
            f"{key} looks like a secret, and launch.to={recipe.launch.to} stores what it submits in plain text; "
            f"remove it, and {_WAYS[recipe.launch.to]}."
        )
