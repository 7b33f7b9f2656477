"""The Prometheus tracker, asked over HTTP and read by Prometheus's own parser, and the dashboard of its metrics."""

import json
import re
import socket
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest

from echelon.learn.evaluation import EvalResult, EvalResults
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers import forwarder as forwarder_module
from echelon.run.journal.trackers import start_trackers
from echelon.run.training.metrics import GpuLoad, StepMetrics, train_row
from tests.log_lines import LogLines
from tests.unit.recipe_samples import SMALL, load_text
from tests.unit.run.journal.trackers.tracked_run import create_run, write
from tests.waiting import wait_until

parser = pytest.importorskip("prometheus_client.parser")

DASHBOARD = Path(__file__).parents[5] / "docs" / "grafana-dashboard.json"


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path, "prometheus")


def scrape(address):
    """Every sample as {(metric, run, set): value}, and the type of each metric."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # also where a proxy is configured
    with opener.open(f"http://{address}/metrics", timeout=60) as answer:
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, sample.labels["run"], sample.labels["set"]): sample.value for sample in samples}, {
        family.type for family in families
    }


def test_the_newest_rows_can_be_collected_while_the_run_lives(run):
    recipe, folder = run
    train = {"kind": "train", "loss": 2.5, "grad_norm": None, "batch_hash": "0a", "skipped": False, "rank_seconds": [1]}
    evaluation = {"kind": "eval", "loss": 3.0, "sets": {'say "hi"\\': {"loss": 3.5}, "code": {"loss": 2.5}}}
    write(folder, {**train, "step": 1, "loss": 9.0}, {**train, "step": 2}, {**evaluation, "step": 2})
    [forwarder] = start_trackers(recipe, folder, 0)
    targets = folder.path.parent / "prometheus" / "small.json"
    wait_until(targets.exists)
    [entry] = json.loads(targets.read_text())
    [address] = entry["targets"]
    assert address.startswith("127.0.0.1:")

    expected = {
        ("echelon_train_step", "small", ""): 2.0,
        ("echelon_train_loss", "small", ""): 2.5,
        ("echelon_eval_step", "small", ""): 2.0,
        ("echelon_eval_loss", "small", ""): 3.0,
        ("echelon_eval_loss", "small", 'say "hi"\\'): 3.5,
        ("echelon_eval_loss", "small", "code"): 2.5,
    }
    assert wait_until(lambda: scrape(address) if len(scrape(address)[0]) == 6 else None) == (expected, {"gauge"})

    write(folder, {**train, "step": 3, "loss": 2.0})
    wait_until(lambda: scrape(address)[0][("echelon_train_step", "small", "")] == 3)
    assert scrape(address)[0][("echelon_train_loss", "small", "")] == 2.0

    forwarder.close(done=True)
    assert not targets.exists()
    with pytest.raises(URLError):
        scrape(address)


def test_a_port_in_use_is_reported_and_taken_when_it_is_free(run, tmp_path, monkeypatch):
    monkeypatch.setattr(forwarder_module, "RETRY_SECONDS", 0.1)
    _, folder = run
    lines = LogLines().lines
    write(folder, {"kind": "train", "step": 1, "loss": 2.0})
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        recipe, _ = load_text(tmp_path, SMALL, "track=[prometheus]", f"prometheus.address=127.0.0.1:{port}")
        [forwarder] = start_trackers(recipe, folder, 0)
        wait_until(lambda: any("track: prometheus fails (OSError: [Errno 98]" in line for line in lines))
    wait_until(lambda: any(f"prometheus metrics at http://127.0.0.1:{port}/metrics" in line for line in lines))
    wait_until(lambda: scrape(f"127.0.0.1:{port}")[0])
    forwarder.close(done=True)


def test_the_dashboard_shows_metrics_that_a_run_on_gpus_has(tmp_path):
    from prometheus_client import CollectorRegistry, generate_latest

    from echelon.run.journal.trackers.prometheus import Prometheus

    metrics = StepMetrics(
        step=0, loss=1.0, router_loss=1.0, expert_load=1.0, grad_norm=1.0, committed=True, loss_scale=1.0,
        learning_rate=1.0, tokens=1, target_tokens=1, batch_hash="0a", data_wait_seconds=1.0, sent_bytes=1.0,
        wall_seconds=1.0, own_seconds=(1.0,), gpu=GpuLoad(1.0, 1.0, 1.0), memory_peak_bytes=1, is_bad=False,
        bad_in_a_row=0, stopped_by=None,
    )  # fmt: skip
    measured = ("tokens", "tokens_per_second", "step_seconds", "mfu", "memory_peak_bytes", "message_wait_seconds")
    train = train_row(metrics, **dict.fromkeys((*measured, "cost_usd"), 1.0))
    evaluation = EvalResults({"validation": EvalResult(1.0, 1, 1.0, "tokens", 1)}).row(1)
    recipe, _ = load_text(tmp_path, SMALL, "track=[prometheus]")
    tracker, registry = Prometheus(recipe, RunFolder(recipe.run.dir), 0), CollectorRegistry()
    registry.register(tracker)
    tracker.send([train, evaluation])
    exported = {family.name for family in parser.text_string_to_metric_families(generate_latest(registry).decode())}

    dashboard = json.loads(DASHBOARD.read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown += [variable["query"] for variable in dashboard["templating"]["list"]]
    names = set(re.findall(r"echelon_\w+", " ".join(shown)))
    assert len(names) > 10 and names <= exported
    assert all(re.search(r"\{run=~\"\$run\"\}|, run\)", expression) for expression in shown)
