"""The OpenTelemetry tracker, whose requests a local server reads with the protocol's own messages."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from echelon.run.journal.trackers import forwarder as forwarder_module
from echelon.run.journal.trackers import start_trackers
from tests.log_lines import LogLines
from tests.unit.run.journal.trackers.tracked_run import create_run, write
from tests.waiting import wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")


class Collector:
    """Stores the points of each request, by name, run and set; answers with `status`."""

    def __init__(self):
        self.status, self.points, self.names, self.refused = 200, {}, set(), 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                collector.take(self.path, self.headers, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path, headers, body):
        assert path == "/v1/metrics" and headers["X-Team"] == "a"
        if self.status != 200:
            self.refused += 1
            return
        [resource] = service.ExportMetricsServiceRequest.FromString(body).resource_metrics
        self.names |= {each.value.string_value for each in resource.resource.attributes if each.key == "service.name"}
        for metric in resource.scope_metrics[0].metrics:
            for point in metric.gauge.data_points:
                places = {each.key: each.value.string_value for each in point.attributes}
                value = point.as_double if point.WhichOneof("value") == "as_double" else point.as_int
                self.points[metric.name, places["run"], places.get("set", "")] = value


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr(forwarder_module, "RETRY_SECONDS", 0.1)
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path, "opentelemetry")


def test_the_newest_rows_reach_the_collector(run, collector):
    recipe, folder = run
    train = {"kind": "train", "loss": 2.5, "grad_norm": None, "batch_hash": "0a", "skipped": False, "tokens": 64}
    evaluation = {"kind": "eval", "loss": 3.0, "sets": {"code": {"loss": 2.0}, "text": {"loss": 4.0}}}
    write(folder, {**train, "step": 1, "loss": 9.0}, {**train, "step": 2}, {**evaluation, "step": 2})
    [forwarder] = start_trackers(recipe, folder, 0)
    expected = {
        ("echelon.train.step", "small", ""): 2,
        ("echelon.train.loss", "small", ""): 2.5,
        ("echelon.train.tokens", "small", ""): 64,
        ("echelon.eval.step", "small", ""): 2,
        ("echelon.eval.loss", "small", ""): 3.0,
        ("echelon.eval.loss", "small", "code"): 2.0,
        ("echelon.eval.loss", "small", "text"): 4.0,
    }
    wait_until(lambda: collector.points == expected)
    assert collector.names == {"echelon"}
    forwarder.close(done=True)


def test_a_collector_that_refuses_is_reported_once_and_gets_later_rows(run, collector):
    recipe, folder = run
    lines = LogLines().lines
    collector.status = 400
    write(folder, {"kind": "train", "step": 1, "loss": 2.0})
    [forwarder] = start_trackers(recipe, folder, 0)
    wait_until(lambda: collector.refused > 2)
    collector.status = 200
    wait_until(lambda: collector.points.get(("echelon.train.loss", "small", "")) == 2.0)
    forwarder.close(done=True)
    assert (
        sum("track: opentelemetry fails (OSError: the collector does not take the metrics" in each for each in lines)
        == 1
    )
