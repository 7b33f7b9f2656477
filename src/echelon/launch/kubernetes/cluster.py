"""Calls of the Kubernetes API server with the official client: plain values in and out, one-line errors."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.extras import missing_package
from echelon.launch.kubernetes.kinds import JobKind

_TIMEOUT_SECONDS = (10, 60)
_LONGEST_MESSAGE = 400


class KubernetesCluster:
    """The cluster of a kubeconfig context, found as kubectl does; None is the current context."""

    def __init__(self, context: str | None) -> None:
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise missing_package("launch.to=kubernetes", "kubernetes", "kubernetes") from error
        try:
            _, current = config.list_kube_config_contexts()
            self.context = context or str(current["name"])
            api = config.new_client_from_config(context=self.context)
        except config.ConfigException as error:
            raise ConfigError(
                f"launch.kubernetes.context={context or 'null, the current one'}: not found in the kubeconfig "
                f"({_shorten(str(error))}); see `kubectl config get-contexts`."
            ) from error
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)

    def create_job(self, kind: JobKind, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create the job and return it as the API server answers. Unknown fields are refused."""
        place = (kind.group, kind.version, body["metadata"]["namespace"], kind.plural)
        with _explained(self.context, kind):
            made: dict[str, Any] = self._custom.create_namespaced_custom_object(
                *place, dict(body), field_validation="Strict", _request_timeout=_TIMEOUT_SECONDS
            )
        return made

    def create_config_map(self, body: Mapping[str, Any]) -> None:
        """Create a ConfigMap."""
        with _explained(self.context):
            self._core.create_namespaced_config_map(
                body["metadata"]["namespace"], dict(body), _request_timeout=_TIMEOUT_SECONDS
            )

    def find_job(self, kind: JobKind, namespace: str, name: str) -> dict[str, Any] | None:
        """The job; None if there is no job of that name."""
        with _explained(self.context, kind, may_be_gone=True):
            return dict(
                self._custom.get_namespaced_custom_object(
                    kind.group, kind.version, namespace, kind.plural, name, _request_timeout=_TIMEOUT_SECONDS
                )
            )
        return None

    def delete_job(self, kind: JobKind, namespace: str, name: str) -> bool:
        """Delete the job and, in the background, its dependents; each pod gets SIGTERM. False if there is none."""
        with _explained(self.context, kind, may_be_gone=True):
            self._custom.delete_namespaced_custom_object(
                kind.group, kind.version, namespace, kind.plural, name, propagation_policy="Background",
                _request_timeout=_TIMEOUT_SECONDS,
            )  # fmt: skip
            return True
        return False

    def list_pods(self, namespace: str, label: str, value: str) -> list[dict[str, Any]]:
        """The pods with a label."""
        with _explained(self.context):
            answer = self._core.list_namespaced_pod(
                namespace, label_selector=f"{label}={value}", _preload_content=False, _request_timeout=_TIMEOUT_SECONDS
            )
            pods: list[dict[str, Any]] = json.loads(answer.data)["items"]
        return pods

    def read_log(self, namespace: str, pod: str, container: str, follow: bool) -> Iterator[str]:
        """Yield the lines a container has printed; with `follow`, also new lines until it ends."""
        options = {} if follow else {"_request_timeout": _TIMEOUT_SECONDS}
        with _explained(self.context):
            answer = self._core.read_namespaced_pod_log(
                pod, namespace, container=container, follow=follow, _preload_content=False, **options
            )
            rest = b""
            for chunk in answer.stream():
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")


@contextmanager
def _explained(context: str, kind: JobKind | None = None, may_be_gone: bool = False) -> Iterator[None]:
    """Turn an error of the API into a LaunchError, except for an object that `may_be_gone`."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = _read_message(error.body)
        if may_be_gone and error.status == 404 and _names_object(error.body):
            return
        raise LaunchError(_explain(error.status, message or str(error.reason), message is None, kind)) from error
    except HTTPError as error:
        reason = _shorten(str(getattr(error, "reason", None) or error))
        raise LaunchError(
            f"the cluster of context {context} does not answer ({reason}); check it with `kubectl get pods`."
        ) from error


def _explain(status: int | None, message: str, plain: bool, kind: JobKind | None) -> str:
    if status == 404 and plain and kind is not None:
        return (
            f"the cluster does not have {kind.kind} ({kind.group}/{kind.version}); install {kind.operator}, or use "
            "another launch.kubernetes.kind."
        )
    if status == 401:
        return "the cluster does not accept the kubeconfig's credentials; log in again."
    if status == 403:
        return (
            f"the cluster does not allow it: {message}; ask its administrator for permission, or use another namespace."
        )
    if status == 409:
        return f"the object exists already: {message}; launch again, or delete the existing object."
    fix = ""
    if kind is not None and kind.kind == "TrainJob":
        fix = "; with a Kubeflow Trainer before 2.3 use launch.kubernetes.kind=jobset, which it has too"
    return f"the cluster refused the request ({status}): {message}{fix}"


def _read_status(body: Any) -> dict[str, Any]:
    """The Status object in the body of an error; empty for an unknown path, which has none."""
    try:
        status = json.loads(body)
    except (TypeError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def _read_message(body: Any) -> str | None:
    message = _read_status(body).get("message")
    return None if message is None else _shorten(str(message))


def _names_object(body: Any) -> bool:
    """Whether a 404 is about an object of a known kind, not about its namespace."""
    details = _read_status(body).get("details") or {}
    return bool(details.get("name")) and details.get("kind") != "namespaces"


def _shorten(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _LONGEST_MESSAGE else plain[: _LONGEST_MESSAGE - 3] + "..."
