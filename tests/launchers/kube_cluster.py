"""A real Kubernetes API server with etcd and the operators' CRDs, but without operators."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config
from urllib3.exceptions import HTTPError

from echelon.ground.sockets import find_free_port
from echelon.launch.kubernetes.manifest import JobKind
from tests.unit.launch.kubernetes.kubernetes_schemas import find_schema, inline
from tests.unit.launch.kubernetes.kubernetes_server import write_kubeconfig
from tests.waiting import wait_until

START_SECONDS = 120
ADMIN, GUEST = "of-the-admin", "of-a-guest"


def missing_programs() -> list[str]:
    return [name for name in ("etcd", "kube-apiserver", "openssl") if shutil.which(name) is None]


@dataclass(frozen=True)
class RealCluster:
    """The address of the cluster; `api` is an administrator's client."""

    address: str
    api: Any
    folder: Path

    def write_kubeconfig(self, token: str = ADMIN) -> Path:
        path = self.folder / f"kubeconfig-{token}"
        write_kubeconfig(path, self.address, token, **{"insecure-skip-tls-verify": True})
        return path

    def install(self, kind: JobKind) -> None:
        """Install a CRD from its published schema, and wait until it is established."""
        schema = inline(find_schema(kind.kind))
        any_object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        schema["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"},
                                 "metadata": {"type": "object"}, "status": any_object}  # fmt: skip
        version = {
            "name": kind.version,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": schema},
            "subresources": {"status": {}},
        }
        names = {
            "plural": kind.plural,
            "singular": kind.kind.lower(),
            "kind": kind.kind,
            "listKind": f"{kind.kind}List",
        }
        body = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{kind.plural}.{kind.group}", "annotations": {"api-approved.kubernetes.io": "test"}},
            "spec": {"group": kind.group, "scope": "Namespaced", "names": names, "versions": [version]},
        }
        definitions = client.ApiextensionsV1Api(self.api)
        definitions.create_custom_resource_definition(body)

        def established() -> bool:
            made = definitions.read_custom_resource_definition(f"{kind.plural}.{kind.group}")
            return any(each.type == "Established" and each.status == "True" for each in made.status.conditions or ())

        await_true(established)


def await_true(condition: Any) -> None:
    wait_until(condition, START_SECONDS, say=lambda: "the API server does not come up")


@contextmanager
def real_cluster(folder: Path) -> Iterator[RealCluster]:
    """Run etcd and an API server during the block."""
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{ADMIN},admin,1,"system:masters"\n{GUEST},guest,2\n')
    store_url, peer_url = (f"http://127.0.0.1:{find_free_port('127.0.0.1')}" for _ in range(2))
    port = find_free_port("127.0.0.1")
    etcd = [
        "etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", store_url,
        "--advertise-client-urls", store_url, "--listen-peer-urls", peer_url,
    ]  # fmt: skip
    server = [
        "kube-apiserver", "--etcd-servers", store_url, "--secure-port", str(port), "--bind-address", "127.0.0.1",
        "--cert-dir", str(folder / "certificates"), "--token-auth-file", str(tokens), "--authorization-mode", "RBAC",
        "--service-account-key-file", str(key), "--service-account-signing-key-file", str(key),
        "--service-account-issuer", "https://kubernetes.test", "--service-cluster-ip-range", "10.0.0.0/24",
        "--disable-admission-plugins", "ServiceAccount",
    ]  # fmt: skip
    with ExitStack() as stack:
        for command in (etcd, server):
            log = stack.enter_context((folder / f"{command[0]}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        address = f"https://127.0.0.1:{port}"
        path = folder / "kubeconfig-admin"
        write_kubeconfig(path, address, ADMIN, **{"insecure-skip-tls-verify": True})
        api = config.new_client_from_config(config_file=str(path))

        def ready() -> bool:
            try:
                client.CoreV1Api(api).read_namespace("default", _request_timeout=2)
            except (client.ApiException, HTTPError):
                return False
            return True

        await_true(ready)
        yield RealCluster(address, api, folder)
