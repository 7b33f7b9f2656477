"""docs/planner-accuracy.md has the accuracy of the report, and the report that of the present planner."""

from pathlib import Path

from echelon.cli.api.quoting import PUBLISHED_HIGH, PUBLISHED_LOW
from echelon.planner.rates import GPU_RATES
from planner_accuracy import (
    Case,
    estimate,
    plan_as_echelon,
    render_error_bar,
    render_memory,
    render_time,
    score_shipped,
)
from published import read_rows
from published_fits import report_fits
from published_memory import score_memory

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planner-accuracy.md").read_text(encoding="utf-8")
REPORT = (ROOT / "benchmarks" / "results" / "planner-accuracy.md").read_text(encoding="utf-8")


def read_table(title):
    """The lines of the table below a heading of the report."""
    lines = REPORT.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    end = next((number for number in range(start, len(lines)) if not lines[number].startswith("|")), len(lines))
    return lines[start:end]


def read_timed():
    return [each for each in read_rows() if isinstance(each, Case) and each.seconds is not None]


def test_the_page_has_the_tables_of_the_report():
    for title in ("Step time", "Memory of each source's program", "Memory: which runs fit"):
        assert "\n".join(read_table(title)) in PAGE, title


def test_the_report_is_that_of_this_planner():
    """All but the constants that were fitted without a source, which take minutes: its columns 7 and 8."""
    timed = read_timed()
    own = score_shipped(timed, lambda case: estimate(case, GPU_RATES))
    planned = score_shipped(timed, plan_as_echelon)
    now = render_time(planned, own, own)
    assert [line.split("|")[:7] for line in read_table("Step time")] == [line.split("|")[:7] for line in now]
    assert render_error_bar(planned) in REPORT
    kept, _ = score_memory([each for each in read_rows() if isinstance(each, Case)])
    assert read_table("Memory of each source's program") == render_memory(kept)
    assert "\n".join(report_fits(timed)).strip() in REPORT


def test_the_error_bar_of_a_quote_is_that_of_the_report():
    words = f"10th percentile {PUBLISHED_LOW:.2f}, 90th percentile {PUBLISHED_HIGH:.2f}."
    assert words in REPORT
    assert f"between {PUBLISHED_LOW:.2f} and {PUBLISHED_HIGH:.2f} times as long" in (ROOT / "docs/cost.md").read_text()
