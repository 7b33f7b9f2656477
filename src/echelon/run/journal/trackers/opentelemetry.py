"""OpenTelemetry: the newest metrics of the run, sent by OTLP over HTTP to a collector."""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers.tracker import Opened, scalars_by_set


class OpenTelemetry:
    """A gauge `echelon.KIND.KEY` for each number of the newest row of a kind, with the attributes `run` and `set`.

    Rows have no time, so the points have that of their sending, and rows that a newer one has replaced are left out.
    The exporter reads OpenTelemetry's own variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS and so on.
    """

    name = "opentelemetry"
    is_store = False

    def __init__(self, recipe: Recipe, folder: RunFolder, resumed_step: int) -> None:
        self._run = recipe.run.name
        self._exporter: OTLPMetricExporter | None = None
        self._resource = Resource({"service.name": "echelon"}).merge(OTELResourceDetector().detect())
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # the forwarder reports a failure once

    def open(self, run_key: str, given: Mapping[str, int]) -> Opened:
        """Read the variables; makes no request."""
        self._exporter = OTLPMetricExporter()
        return Opened(defaultdict(int, given), "opentelemetry metrics to OTEL_EXPORTER_OTLP_ENDPOINT")

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Send the newest row of each kind. Raises OSError if the collector does not take it."""
        assert self._exporter is not None
        now = time.time_ns()
        metrics = []
        for row in {row["kind"]: row for row in rows}.values():
            labels = {"run": self._run}
            points = defaultdict(list, {f"{row['kind']}/step": [NumberDataPoint(labels, now, now, row["step"])]})
            for name, numbers in scalars_by_set(row):
                for key, value in numbers.items():
                    points[key].append(NumberDataPoint({**labels, "set": name} if name else labels, now, now, value))
            metrics += [
                Metric(f"echelon.{key.replace('/', '.')}", None, None, Gauge(gauge)) for key, gauge in points.items()
            ]
        scope = ScopeMetrics(InstrumentationScope("echelon"), metrics, "")
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise OSError("the collector does not take the metrics; see OTEL_EXPORTER_OTLP_ENDPOINT")

    def finish(self, done: bool) -> None:
        """Close the connection."""
        if self._exporter is not None:
            self._exporter.shutdown()
            self._exporter = None
