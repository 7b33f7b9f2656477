"""Secrets of a job in a container: read from AWS Secrets Manager or Parameter Store, for the training's processes only.

They are in no file, no request and no message: a recipe names where they are.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.redaction import HIDDEN
from echelon.recipe.sagemaker_sections import SECRET_SCHEME

_KEY = "launch.sagemaker.secrets"
_CONNECT_SECONDS, _READ_SECONDS, _ATTEMPTS = 10, 20, 3
# A shorter value could be a part of any word.
_SHORTEST_HIDDEN = 6
_PERMISSIONS = {"secretsmanager": "secretsmanager:GetSecretValue", "ssm": "ssm:GetParameter"}
_HINTS = {
    "AccessDeniedException": "the role of the job, launch.sagemaker.role, needs {permission} on it",
    "ResourceNotFoundException": "give its ARN if it is in another region or account",
    "ParameterNotFound": "correct its ARN",
    "DecryptionFailure": "the role of the job, launch.sagemaker.role, needs kms:Decrypt on its key",
}


def read_secrets(references: Mapping[str, str], region: str | None) -> dict[str, str]:
    """The values of `launch.sagemaker.secrets`, by variable. `region`: of secrets that are given by name.

    Raises ConfigError and LaunchError with the key of the first secret that cannot be read, and nothing of its value.
    """
    if not references:
        return {}
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise ConfigError(
            f"{_KEY} requires the package boto3; set launch.sagemaker.image to one that has it."
        ) from None
    settings = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
    )
    texts: dict[str, str] = {}
    values: dict[str, str] = {}
    for variable, reference in references.items():
        shown = f"{_KEY}.{variable}={reference}"
        secret, _, key = reference.removeprefix(SECRET_SCHEME).partition("#")
        if secret not in texts:
            arn = re.match(r"arn:[^:]*:[^:]*:([^:]+):", secret)
            if (where := arn[1] if arn else region) is None:
                raise ConfigError(
                    f"{shown}: the region is unknown; give the secret's ARN, or set launch.sagemaker.region."
                )
            service = "ssm" if ":ssm:" in secret else "secretsmanager"
            client = boto3.Session(region_name=where).client(service, config=settings)
            texts[secret] = _ask(client, secret, where, shown)
        values[variable] = _choose(texts[secret], key, shown)
    return values


def _ask(client: Any, place: str, region: str, shown: str) -> str:
    from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

    service = client.meta.service_model.service_name
    try:
        if service == "ssm":
            return str(client.get_parameter(Name=place, WithDecryption=True)["Parameter"]["Value"])
        answer = client.get_secret_value(SecretId=place)
    except ClientError as error:
        said = error.response.get("Error", {})
        code, words = said.get("Code", ""), " ".join(str(said.get("Message", "")).split()).rstrip(".")
        hint = f"; {_HINTS[code].format(permission=_PERMISSIONS[service])}" if code in _HINTS else ""
        raise LaunchError(f"{shown}: AWS refused to read it in {region} ({code}): {words}{hint}.") from None
    except (ConnectionError, HTTPClientError) as error:
        raise LaunchError(
            f"{shown}: {service} cannot be reached ({type(error).__name__}); in subnets without a NAT gateway, add an "
            f"endpoint for com.amazonaws.{region}.{service} to the VPC."
        ) from None
    except BotoCoreError as error:
        raise LaunchError(f"{shown}: cannot be read: {' '.join(str(error).split()).rstrip('.')}.") from None
    if "SecretString" not in answer:
        raise ConfigError(f"{shown} is a binary secret, but a variable must be text; store it as text.")
    return str(answer["SecretString"])


def _choose(text: str, key: str, shown: str) -> str:
    """The value of a key in a secret that is JSON, or a plain secret. An error shows nothing of a secret's content."""
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        if key:
            raise ConfigError(f"{shown} has a key, but the secret is not a JSON object; remove #{key}.")
        value = text.strip("\r\n")
    elif not key:
        raise ConfigError(f"{shown} is a JSON object with {len(content)} keys; choose one: {shown}#KEY.")
    elif not isinstance(content.get(key), str):
        what = "that is not text" if key in content else "that it does not have"
        raise ConfigError(f"{shown} names a key {what}; give the key of a text.")
    else:
        value = content[key]
    if not value or "\0" in value:
        raise ConfigError(f"{shown} {'is empty' if not value else 'has a zero byte'}, so it cannot be a variable.")
    return value


def hide_values(text: str, values: Iterable[str]) -> str:
    """The text with these values replaced by `***`."""
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST_HIDDEN:
            text = text.replace(value, HIDDEN)
    return text
