"""Prometheus: the newest metrics of the run as text at an address of rank 0's machine, for Prometheus to collect."""

import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from echelon.ground.stored import write_json
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers.tracker import Opened, scalars_by_set

TARGETS = "prometheus"
"""The folder next to the run folder that has a file for each running run: its address, for `file_sd_configs`."""

_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_]")
_EVERYWHERE = ("0.0.0.0", "::")


class Prometheus(Collector):
    """A gauge `echelon_KIND_KEY` for each number of the newest row of a kind, with the labels `run` and `set`.

    `set` is the validation set of an evaluation, and empty for the other numbers. Nothing is kept: after a restart the
    forwarder sends all rows again.
    """

    name = "prometheus"
    is_store = False

    def __init__(self, recipe: Recipe, folder: RunFolder, resumed_step: int) -> None:
        self._run = recipe.run.name
        host, _, self._port = recipe.prometheus.address.rpartition(":")
        self._host = host.strip("[]")
        self._targets = folder.path.absolute().parent / TARGETS / f"{folder.path.name}.json"
        self._newest: dict[str, Mapping[str, Any]] = {}  # by kind of row
        self._server: tuple[WSGIServer, Thread] | None = None

    def open(self, run_key: str, given: Mapping[str, int]) -> Opened:
        """Listen at the address, and write the file that tells Prometheus of it. Raises OSError if it is in use."""
        self._stop()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server = start_http_server(0 if self._port == "auto" else int(self._port), self._host, registry)
        port = self._server[0].server_port
        host = socket.gethostname() if self._host in _EVERYWHERE else self._host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._targets.parent.mkdir(exist_ok=True)
        write_json(self._targets, [{"targets": [address], "labels": {}}])
        return Opened(defaultdict(int), f"prometheus metrics at http://{address}/metrics")

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Replace what is shown by these rows."""
        self._newest = {**self._newest, **{row["kind"]: row for row in rows}}

    def finish(self, done: bool) -> None:
        """Stop listening, and remove the file."""
        self._stop()
        self._targets.unlink(missing_ok=True)

    @override
    def collect(self) -> Iterator[Metric]:
        """The gauges, for a request in a thread of the server."""
        for kind, row in self._newest.items():
            gauges: dict[str, GaugeMetricFamily] = {}
            for name, numbers in scalars_by_set(row):
                for key, value in numbers.items():
                    gauges.setdefault(key, _gauge(key)).add_metric([self._run, name], value)
            gauges["step"] = _gauge(f"{kind}/step")
            gauges["step"].add_metric([self._run, ""], row["step"])
            yield from gauges.values()

    def _stop(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None


def _gauge(name: str) -> GaugeMetricFamily:
    kind, _, key = name.partition("/")
    text = f"{key} of the newest {kind} row of metrics.jsonl"
    return GaugeMetricFamily(_FORBIDDEN.sub("_", f"echelon_{kind}_{key}"), text, labels=["run", "set"])
