"""`echelon report` of runs whose files are written by hand: every figure is worked out from the rows."""

import dataclasses
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest

from echelon.ground.sizes import render_rate, render_seconds
from echelon.run.report.blocks import pick_axis, pick_ticks, render_number, render_percent, smooth
from echelon.run.report.comparison import build_comparison
from echelon.run.report.page import render_page
from echelon.run.report.run_record import percentile, read_record
from echelon.run.report.sections import ROW_KEYS, build_report, list_figures
from echelon.run.report.server import read_live
from echelon.run.training.metrics import StepMetrics, train_row

START = 1_795_437_230.0


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(path, num_steps=41, wait=0.0, goodput=None, ending="done", losses=(3.0, 2.0), **documents):
    """A run whose first step takes 10 s and whose other steps take 1 s, with 100 tokens each."""
    path.mkdir(parents=True)
    rows = [
        {
            "kind": "train", "step": step, "tokens": 100 * step, "loss": 4.0 - step / 100, "grad_norm": 1.0,
            "tokens_per_second": 10.0 if step == 1 else 100.0, "step_seconds": 10.0 if step == 1 else 1.0,
            "data_wait_seconds": wait, "mfu": 0.25, "memory_peak_bytes": 2**30, "skipped": False,
        }
        for step in range(1, num_steps + 1)
    ]  # fmt: skip
    rows += [{"kind": "eval", "step": 10 * place, "loss": loss} for place, loss in enumerate(losses, start=1)]
    write_lines(path / "metrics.jsonl", sorted(rows, key=lambda row: row["step"]))
    events = [{"event": "prepare", "time": START}, {"event": "start", "time": START + 5, "step": 0, "host": "one"}]
    memory = {"weights": 2**20, "activations": 2**21}
    events.append({"event": "memory", "time": START + 6, "planned": memory, "measured": memory | {"weights": 2**21}})
    if goodput is not None:
        events.append({"event": "goodput", "time": START + 90, "step": num_steps, "seconds": goodput})
    if ending is not None:
        events.append(
            {"event": ending, "time": START + 100, "step": num_steps, "message": "it <b>broke</b> at step 41"}
        )
    write_lines(path / "events.jsonl", events)
    if ending == "done":
        (path / "outcome.json").write_text(json.dumps({"time": START + 100, "outcome": "done", "step": num_steps}))
    for name, content in documents.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


class Page(HTMLParser):
    """The tags, attributes and text of a page; `is_whole`: every tag is closed where it should be."""

    VOID = ("meta", "rect", "line", "path")

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self._open = [], [], [], []
        self.is_whole = True
        self.feed(text)
        self.is_whole &= not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        self.is_whole &= bool(self._open) and self._open.pop() == tag

    def handle_data(self, text):
        self.words.append(text)


def find(report, title):
    return next(section for section in report.sections if section.title == title)


def advice(path):
    sections = [section for section in build_report(read_record(path)).sections if section.title == "Advice"]
    return [line for section in sections for block in section.blocks for line in block.lines]


def test_the_figures_are_those_of_the_files(tmp_path):
    goodput = {"training": 40.0, "starting": 50.0, "redone": 7.0, "down": 3.0, "stopped": 900.0}
    spending = {"seconds": 7200.0, "usd": 8.2, "unpriced_machine_seconds": 0.0, "until": 1.0, "reserve_seconds": 0.0}
    path = write_run(
        tmp_path / "a",
        goodput=goodput,
        spending=spending,
        estimate={"schedule": {"steps": 50}, "seconds": {"step": 0.8}},
    )
    assert list_figures(read_record(path)) == {
        "steps": "41/50",
        "tokens": "4,100",
        "training loss": "3.5900",
        "evaluation loss": "2.0000",
        "solved": "unknown",
        "bits per byte": "unknown",
        "tokens per second": "100",  # without the first step
        "MFU": "25.0 %",
        "peak memory": "1.00 GiB",
        "useful time": "40.0 %",  # without the time in which it was stopped
        "time": "2h00m",
        "cost": "$8.20",
    }
    report = build_report(read_record(path))
    lines = find(report, "Predicted and measured").blocks[-1].lines
    assert lines == ["The plan predicted 800 ms for a step; the median is 1.00 s (25 % longer)."]
    bars, table, _ = find(report, "Memory").blocks
    assert [sum(value for _, value in parts) for _, parts in bars.rows] == [3 * 2**20, 4 * 2**20]
    assert ("total", "3.00 MiB", "4.00 MiB", "33 % more") in table.rows
    costs = dict(find(report, "Where the time went").blocks[-1].rows)
    assert costs["cost of a million tokens"] == "$2000.0000"
    assert costs["cost of failures"] == "$0.82"  # a tenth of $8.20
    assert costs["cost of saves, starts and other time without steps"] == "$4.10"
    assert (report.status, report.is_bad) == ("done", False)


def test_advice_states_what_a_change_gains(tmp_path):
    assert advice(write_run(tmp_path / "good", goodput={"training": 90.0, "saving": 1.0})) == []
    [data] = advice(write_run(tmp_path / "data", wait=0.5))  # half of each step but the first
    assert "50.0 % of their time" in data and "up to 2.00 times as fast" in data
    [evaluations] = advice(write_run(tmp_path / "evaluations", goodput={"training": 60.0, "evaluating": 40.0}))
    assert "40.0 % of the time" in evaluations and "would be 1.25 times as fast" in evaluations  # 100 / 80
    path = write_run(tmp_path / "saves", goodput={"training": 75.0, "saving": 25.0})
    assert "checkpoint.every twice as high: the run would be 1.14 times as fast" in advice(path)[0]  # 100 / 87.5
    (path / "recipe.yaml").write_text("checkpoint: {async: false}\n")
    assert "checkpoint.async: true: the run would be up to 1.33 times as fast" in advice(path)[0]


def test_waiting_for_messages_is_pointed_out(tmp_path):
    plan = {"pp": 1, "tp": 1, "cp": 1, "ep": 1, "reduce_gradients": "last", "reshard_after_forward": False}
    path = write_run(tmp_path / "a", plan=plan)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    more = {"sent_bytes": 5 * 2**20, "message_wait_seconds": 0.6}
    write_lines(path / "metrics.jsonl", [row | more if row["kind"] == "train" else row for row in rows])
    (path / "recipe.yaml").write_text("train: {global_batch_size: 8}\n")
    [line] = advice(path)
    assert "waits for messages for 60.0 % of a step, and sends 5.00 MiB, 5.24 MB/s on average" in line
    assert "train.global_batch_size=16" in line and "1.43 times as fast" in line  # 2 x 1.0 s in place of 1.4 s
    events = (path / "events.jsonl").read_text()
    carried = {"lo": {"sent": 9e9}, "eth0": {"sent": 3e8, "received": 3e8}, "eth1": {"sent": 1e3}}
    sent = {"event": "network", "time": START + 99, "host": "node-1", "seconds": 41.0, "sent_bytes": 2e8}
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps(sent | {"interfaces": carried}) + "\n")
    assert "5.24 MB/s on average, through eth0 of node-1. With" in advice(path)[0]
    (path / "events.jsonl").write_text(events)
    network = find(build_report(read_record(path)), "Network")
    assert network.blocks[0].lines == ["In a step each rank sends 5.00 MiB in collectives, 5.24 MB/s on average."]
    (path / "plan.json").write_text(json.dumps(plan | {"reshard_after_forward": True}))
    assert "the gain is not predicted" in advice(path)[0]
    (path / "plan.json").write_text(json.dumps(plan | {"pp": 2}))  # its bubble is such a wait
    assert advice(path) == []


def test_what_the_run_measured_at_its_end_is_repeated(tmp_path):
    path = write_run(tmp_path / "a")
    line = "pipeline: the processes waited for other stages in 21.0% of the last step (20.0% predicted)"
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "measured", "time": START + 99, "lines": [line]}) + "\n")
    assert find(build_report(read_record(path)), "Throughput").blocks[-1].lines[-1] == line


def test_what_was_predicted_is_shown_beside_what_was_measured(tmp_path):
    path = write_run(tmp_path / "a", estimate={"seconds": {"step": 0.8}})
    predicted = {"step_seconds": 0.8, "tokens_per_second": 125.0, "hours": 0.5, "usd": 2.0, "memory_total": 1.0}
    measured = {"step_seconds": 1.0, "tokens_per_second": 100.0, "hours": 0.625, "usd": 2.5, "memory_total": 1.0}
    with (path / "events.jsonl").open("a") as file:
        row = {"event": "reckoning", "time": START + 99, "predicted": predicted, "measured": measured}
        file.write(json.dumps(row) + "\n")
    [table] = find(build_report(read_record(path)), "Predicted and measured").blocks
    assert table.rows == [
        ("step", "800 ms", "1.00 s", "25 % longer"),
        ("tokens per second", "125", "100", "20 % less"),
        ("all steps", "30m00s", "37m30s", "25 % longer"),
        ("cost of all steps", "$2.00", "$2.50", "25 % more"),
    ]


def rewrite(path, change):
    """Change the train rows of a run."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    write_lines(path / "metrics.jsonl", [row | change(row["step"]) if row["kind"] == "train" else row for row in rows])


def test_a_heat_map_shows_the_own_time_of_each_rank(tmp_path):
    """Older versions wrote a list of all ranks."""
    path = write_run(tmp_path / "a")
    times = {25: [0.5, 0.75, "?"], 30: [0.5, 1.5, 0.25], 35: None, 41: [0.5, 0.75]}
    times[30] = dict(zip("012", times[30], strict=True)) | {"median": 0.5}
    rewrite(path, lambda step: {"rank_seconds": times.get(step)})
    heat = find(build_report(read_record(path)), "Throughput").blocks[-1]
    assert (heat.name, heat.rows) == ("seconds of a rank's own part of a step", ["rank 0", "rank 1", "rank 2"])
    assert heat.columns == ["step 25", "step 30", "step 41"]
    assert heat.values == [[0.5, 0.5, 0.5], [0.75, 1.5, 0.75], [None, 0.25, None]]


def test_the_heat_map_of_many_ranks_and_steps_is_of_the_slowest_ranks(tmp_path):
    path = write_run(tmp_path / "a", num_steps=250, environment={"cluster": {"kind": "cuda"}})
    rewrite(path, lambda step: {"rank_seconds": [step + rank / 100 for rank in range(40)]})
    heat = find(build_report(read_record(path)), "Throughput").blocks[-1]
    assert heat.name == "seconds of waiting for data, the slowest ranks"
    assert heat.rows == [f"rank {rank}" for rank in range(8, 40)]
    assert heat.columns == [f"step {step}" for step in [*range(3, 250, 3), 250]]
    assert heat.values[0][:2] == [2.08, 5.08] and heat.values[-1][-1] == 250.39  # medians of three steps


def test_the_load_of_gpus_is_described(tmp_path):
    path = write_run(tmp_path / "a")
    rewrite(path, lambda step: {"gpu_utilization": 0.5 if step % 2 else 1.0, "gpu_watts": 300.0 + 200 * (step % 2)})
    lines = find(build_report(read_record(path)), "Throughput").blocks[2].lines
    assert "A GPU ran kernels for 75.0 % of the time, with 400 W on average. MFU says how well" in " ".join(lines)


def test_uneven_steps_are_pointed_out(tmp_path):
    path = write_run(tmp_path / "a", num_steps=101)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:  # ten of the hundred steps after the first take 6 s
        if row["kind"] == "train" and row["step"] % 10 == 5:
            row["step_seconds"] = 6.0
    write_lines(path / "metrics.jsonl", rows)
    [line] = advice(path)
    assert "takes 6.00 s or more; the median is 1.00 s" in line and "1.50 times as fast" in line  # 150 s for 100


def test_a_run_in_progress_a_failed_one_and_an_empty_one_have_a_report(echelon, tmp_path):
    write_run(tmp_path / "runs" / "failed", ending="failure")
    code, out, _ = echelon("report", "failed", "--text")
    assert code == 0 and out.startswith("failed: failed") and "- it <b>broke</b> at step 41" in out
    # 50 s of steps in the 100 s since the first event
    assert "in steps that count" in out and re.search(r"in all else: .* 50\.0 s +50\.0 %", out)
    (tmp_path / "runs" / "empty").mkdir()
    write_lines(tmp_path / "runs" / "empty" / "events.jsonl", [{"event": "prepare", "time": START}])
    for arguments in (("--text",), ()):
        assert echelon("report", "empty", *arguments)[0] == 0
    damaged = write_run(tmp_path / "runs" / "damaged", environment={"packages": 5, "cluster": "x"}, plan={"tp": []})
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write("{torn\n")
    assert "damaged/metrics.jsonl: skipping line 44" in echelon("report", "damaged", "--text")[1]


def test_the_page_needs_nothing_from_elsewhere(echelon, tmp_path):
    path = write_run(tmp_path / "runs" / "a", num_steps=3000, ending="failure")
    code, out, _ = echelon("report", "a")
    assert (code, out) == (0, "report: runs/a/report.html\n")
    text = (path / "report.html").read_text()
    page = Page(text)
    assert page.is_whole
    assert not {"script", "link", "img", "iframe", "b"} & {*page.tags}
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in page.attributes}
    assert "http" not in re.sub("http-equiv", "", text) and "url(" not in text
    assert "it <b>broke</b> at step 41" in "".join(page.words)
    assert len(text) < 300_000  # long curves are thinned
    assert page.tags.count("svg") == 7  # three curves, three bars, the timeline


def test_runs_are_compared(echelon, tmp_path):
    for name in ("a", "b", "c"):
        path = write_run(tmp_path / "runs" / name, losses=(3.0, {"a": 2.5, "b": 2.25, "c": 2.0}[name]))
        (path / "recipe.yaml").write_text(f"run: {{name: {name}}}\noptim: {{learning_rate: 0.{ord(name)}, eps: 1}}\n")
    code, out, _ = echelon("report", "a", "--compare", "b", "c", "--text")
    assert code == 0
    assert re.search(r"evaluation loss +2\.5000 +2\.2500 +2\.0000", out)
    assert re.search(r"optim.learning_rate +0\.97 +0\.98 +0\.99", out) and "optim.eps" not in out
    assert echelon("report", "a", "--compare", "b", "--compare", "c", "--text")[1].startswith("a, compared with b, c")


def test_a_comparison_has_a_page_of_its_own(echelon, tmp_path):
    for name in ("a", "b", "c"):
        write_run(tmp_path / "runs" / name)
    folder = tmp_path / "runs" / "a"
    assert echelon("report", "a")[1] == "report: runs/a/report.html\n"
    before = (folder / "report.html").read_text()
    for names in (("b",), ("c",), ("b", "c")):
        code, out, _ = echelon("report", "a", "--compare", *names)
        assert (code, out) == (0, f"report: runs/a/report-compare-{'-'.join(names)}.html\n")
    assert (folder / "report.html").read_text() == before
    text = (folder / "report-compare-b.html").read_text()
    page = Page(text)
    assert page.is_whole and 'class="figures"' not in text and "small" not in page.tags[: page.tags.index("section")]
    assert page.words.count("Events") == 0  # of one of the runs alone


def compare(path, **others):
    """The comparison of run `a` with another one, which differs in these files and rows; its sections by title."""
    first, second = write_run(path / "a"), write_run(path / "b")
    for folder, change in ((first, {}), (second, others)):
        (folder / "recipe.yaml").write_text(
            change.get("recipe", "data: {train: [{path: a, fields: {}}], shuffle: true}\n")
        )
        rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        start = {"tokenizer": "t", "held_out": "h", "held_out_bytes": 1000} | change.get("start", {})
        write_lines(folder / "events.jsonl", [row | start if row["event"] == "start" else row for row in rows])
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        bits = {"bits_per_byte": 2.5}
        tokens = change.get("tokens", 100)
        write_lines(
            folder / "metrics.jsonl",
            [row | ({"tokens": tokens * row["step"]} if row["kind"] == "train" else bits) for row in rows],
        )
    report = build_comparison([read_record(first), read_record(second)])
    return {section.title: section.blocks for section in report.sections}


def test_losses_that_do_not_compare_are_pointed_out(tmp_path):
    same = compare(tmp_path / "same")
    assert "What does not compare" not in same
    figures = {row[0]: row[1:] for row in same["Side by side"][0].rows}
    assert figures["bits per byte"] == ("2.5000", "2.5000") and "cost" not in figures  # nobody knows it
    [other] = compare(tmp_path / "tokenizer", start={"tokenizer": "u", "held_out": "i"})["What does not compare"]
    assert other.tone == "warning" and len(other.lines) == 1
    assert other.lines[0].startswith("The runs have different tokenizers.") and "bits per byte" in other.lines[0]
    [other] = compare(tmp_path / "text", start={"held_out": "i", "held_out_bytes": 2000})["What does not compare"]
    assert len(other.lines) == 1 and "different held-out texts (a 1,000 bytes, b 2,000 bytes)" in other.lines[0]
    both = {"tokenizer": "u", "held_out": "i", "held_out_bytes": 2000}
    [other] = compare(tmp_path / "both", start=both)["What does not compare"]
    assert len(other.lines) == 2
    old = {"tokenizer": None, "held_out": None, "held_out_bytes": None}  # of an earlier version
    recipe = "tokenizer: bytes\ndata: {train: [{path: b, fields: {}}], shuffle: false}\n"
    [other] = compare(tmp_path / "old", start=old, recipe=recipe)["What does not compare"]
    assert len(other.lines) == 2


def test_training_losses_of_other_objectives_or_loops_do_not_compare(tmp_path):
    data = "data: {train: [{path: a, fields: {}}], shuffle: true}\n"
    for name, more in (("loop", "train: {loop: 'own:loop'}\n"), ("objective", "objective: {name: distill}\n")):
        [other] = compare(tmp_path / name, recipe=data + more)["What does not compare"]
        assert len(other.lines) == 1 and other.lines[0].startswith("The runs have different objectives or loops"), name
    assert "What does not compare" not in compare(tmp_path / "rate", recipe=data + "optim: {learning_rate: 1}\n")


def test_a_loop_has_its_metrics_and_a_loss_of_its_own(tmp_path):
    run = write_run(tmp_path / "a", num_steps=3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [row | {"heat": 10.0 - row["step"], "<b>": 1.0} if row["kind"] == "train" else row for row in rows]
    write_lines(run / "metrics.jsonl", own)
    (run / "recipe.yaml").write_text("run: {name: a}\n")
    sections = {section.title: section.blocks for section in build_report(read_record(run)).sections}
    assert "Metrics of the loop" not in sections
    assert [curves.name for curves in sections["Loss"]] == ["loss", "gradient norm, before clipping"]
    (run / "recipe.yaml").write_text("train: {loop: 'own:loop'}\n")
    sections = {section.title: section.blocks for section in read_live(run).sections}
    heat, other = sections["Metrics of the loop"]
    assert (heat.name, other.name) == ("heat", "<b>")
    assert [(series.name, series.points) for series in heat.series] == [("", [(1.0, 9.0), (2.0, 8.0), (3.0, 7.0)])]
    told, training, evaluation, _ = sections["Loss"]
    assert told.lines == ["The training loss is that of own:loop; it may be another quantity than the evaluation loss."]
    assert (training.name, len(training.series), evaluation.name) == ("training loss", 1, "evaluation loss")
    assert evaluation.series[0].points == [(10.0, 3.0), (20.0, 2.0)]
    assert Page(render_page(build_report(read_record(run)))).is_whole


def test_the_keys_that_are_not_metrics_of_a_loop_are_those_of_a_row():
    fields = dict.fromkeys((field.name for field in dataclasses.fields(StepMetrics)), 1.0)
    assert train_row(StepMetrics(**fields | {"gpu": None, "own_seconds": [], "further": {}})).keys() == ROW_KEYS


def test_a_smoothed_line_is_the_median_around_each_point_and_of_many_around_some():
    drawn = random.Random(1)
    points = [(float(step), drawn.random()) for step in range(1000)]
    medians = [sorted(y for _, y in points[max(0, n - 10) : n + 11]) for n in range(1000)]
    assert [y for _, y in smooth(points)] == [pytest.approx(statistics.median(near)) for near in medians]
    began = time.process_time()
    line = smooth([(float(step), drawn.random()) for step in range(400_000)])
    assert time.process_time() - began < 40  # around every point it took many minutes
    assert [x for x, _ in line] == list(range(0, 400_000, 200)) and all(0.4 < y < 0.6 for _, y in line)


def test_all_curves_of_a_comparison_have_one_axis(tmp_path):
    """Evaluations after 10 and 20 steps, of 100 tokens in one run and 400 in the other."""
    curves = compare(tmp_path, tokens=400)["Curves"]
    evaluations = ["evaluation loss", "bits per byte of the held-out text"]
    smoothed = [f"{name}, smoothed" for name in ("training loss", "tokens per second")]
    assert [each.name for each in curves] == [smoothed[0], *evaluations, smoothed[1]]
    assert {each.axis for each in curves} == {"tokens"}
    assert [series.points for series in curves[1].series] == [[(1000, 3.0), (2000, 2.0)], [(4000, 3.0), (8000, 2.0)]]


def test_recipes_are_compared_without_python(tmp_path):
    recipe = (
        "data: {train: [{path: b, fields: {}}], shuffle: false}\noptim: {betas: [0.9, 0.95], learning_rate: 1.0e-3}\n"
    )
    [table] = compare(tmp_path, recipe=recipe)["What differs in the recipes"]
    assert table.rows == [
        ("data.shuffle", "true", "false"),
        ("data.train.0.path", "a", "b"),
        ("optim.betas", "-", "0.9, 0.95"),
        ("optim.learning_rate", "-", "0.001"),
    ]


def test_cards_show_what_is_known_and_says_something(tmp_path):
    path = write_run(tmp_path / "a", environment={"cluster": {"kind": "cpu"}})
    names = [name for name, _ in build_report(read_record(path)).figures]
    assert "cost" not in names and "MFU" not in names and "tokens per second" in names
    assert "MFU" in dict(build_report(read_record(write_run(tmp_path / "gpu"))).figures)


def test_small_parts_have_no_rows(tmp_path):
    path = write_run(tmp_path / "a")
    memory = {"weights": 2**28, "other": 2**17}
    sent = {"all_reduce world": 10**9, "broadcast world": 24}
    with (path / "events.jsonl").open("a") as file:
        for row in (
            {"event": "memory", "time": START + 7, "planned": memory, "measured": memory | {"other": 0}},
            {"event": "network", "time": START + 99, "host": "one", "seconds": 41.0, "collectives": sent},
        ):
            file.write(json.dumps(row) + "\n")
    rewrite(path, lambda step: {"sent_bytes": 10**6})
    report = build_report(read_record(path))
    assert [row[0] for row in find(report, "Memory").blocks[1].rows] == ["weights", "total"]
    assert [row[0] for row in find(report, "Network").blocks[1].rows] == ["all_reduce world"]
    assert render_percent(-0.0001) == "0.0 %"


def test_axes_have_values_between_their_ends(tmp_path):
    page = render_page(build_report(read_record(write_run(tmp_path / "a", num_steps=410))))
    [first, *_] = re.findall(r'<div class="ticks">(.*?)</div>', page, re.DOTALL)
    assert re.findall(r">(\d+)<", first) == ["100", "200", "300", "400"]
    assert pick_axis(1.0, 3.0) == [1.0, 2.0, 3.0] and pick_axis(7.0, 7.0) == [7.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "echelon: nothing is not a run: neither it nor runs/nothing has an events.jsonl"),
        (("a", "b"), "echelon: echelon report a b has several runs; write a --compare b."),
    ],
)
def test_wrong_arguments_are_refused(echelon, tmp_path, arguments, message):
    write_run(tmp_path / "runs" / "a")
    code, _, err = echelon("report", *arguments)
    assert code == 2 and err.startswith(message)


def test_no_torch_is_needed(tmp_path):
    path = write_run(tmp_path / "a")
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['echelon', 'report', sys.argv[1]]\n"
        "from echelon.cli.main import main; main()"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True)
    assert (path / "report.html").exists()


def test_numbers_are_short_and_ticks_round():
    assert [render_number(value) for value in (0, 12.3456, 0.00012345, 1234567.0, None)] == [
        "0", "12.35", "0.0001234", "1,234,567", "unknown",
    ]  # fmt: skip
    assert [render_seconds(value) for value in (0.0042, 0.25, 1.236, 12.34, 3720)] == [
        "4.20 ms", "250 ms", "1.24 s", "12.3 s", "1h02m",
    ]  # fmt: skip
    rates = [render_rate(value) for value in (1.25e9, 3e8, 20_500, 8.6, 0.0)]
    assert rates == ["1.25 GB/s", "300 MB/s", "20.5 kB/s", "9 B/s", "0 B/s"]
    assert pick_ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert pick_ticks(2.3, 10.9) == [4.0, 6.0, 8.0, 10.0]
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5 and percentile([7.0], 0.95) == 7.0


@pytest.mark.slow
def test_a_browser_shows_the_page(echelon, tmp_path):
    """On a desk and on a phone: nothing is wider than the screen, every picture is drawn, nothing is fetched."""
    browsers = pytest.importorskip("playwright.sync_api")
    import shutil

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium or Chrome")
    path = write_run(tmp_path / "runs" / "a", num_steps=500, wait=0.2, goodput={"training": 60.0, "evaluating": 40.0})
    write_run(tmp_path / "runs" / "b")
    assert echelon("report", "a", "--compare", "b")[0] == echelon("report", "a")[0] == 0
    backgrounds = set()
    with browsers.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        pages = (("report.html", 7), ("report-compare-b.html", 3))
        screens = ((1280, "light"), (360, "dark"))
        for (name, count), (width, scheme) in itertools.product(pages, screens):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            asked, said = [], []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, said=said: said.append(message.text))
            page.goto(f"file://{path}/{name}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            boxes = page.evaluate("[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect())")
            assert len(boxes) >= count and all(box["width"] > 0.7 * width - 300 and box["height"] > 15 for box in boxes)
            assert page.locator("h2").count() >= count
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert asked == [f"file://{path}/{name}"] and said == []
    assert len(backgrounds) == 2
