"""What is launched is written down in plain text, here and at the target: no secret may be in it."""

from echelon.errors import ConfigError
from echelon.recipe import Recipe, find_secret_keys
from echelon.recipe.launching import Target

# How a secret gets to the processes of each target without standing in what is submitted.
_WAYS: dict[Target, str] = {
    "local": "set it as a variable where `echelon launch` is run; the job inherits them",
    "torchrun": "keep it in a file of each machine, and read it in launch.setup: `NAME=$(cat FILE)`, `export NAME`",
    "slurm": "set it as a variable where `echelon launch` is run, which sbatch passes on, or read it in launch.setup "
    "from a file that only you can read: `NAME=$(cat FILE)`, `export NAME`",
    "kubernetes": "put it into a Secret of the cluster, and name that in launch.kubernetes.env_from_secrets or in "
    "launch.kubernetes.volumes",
    "sagemaker": "read it in launch.setup from AWS Secrets Manager: `NAME=$(aws secretsmanager "
    "get-secret-value --secret-id ID --query SecretString --output text)`, `export NAME`",
}


def refuse_secrets(recipe: Recipe) -> None:
    """Raise ConfigError for the first value that looks like a secret, by its key and with no part of it.

    The whole recipe is looked at: scripts and requests are made of it, and the job trains from a copy in which secrets
    are hidden. `launch.to` must be set.
    """
    assert recipe.launch.to is not None
    for key in find_secret_keys(recipe):
        raise ConfigError(
            f"{key} looks like a secret, and launch.to={recipe.launch.to} writes what it submits in plain text; take "
            f"it out, and {_WAYS[recipe.launch.to]}."
        )
