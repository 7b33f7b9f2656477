"""The results of `make parity-table`: a killed run resumes, parts are disjoint, and the page shows the results."""

import subprocess
import sys
from dataclasses import replace

import pytest

import parity_table
from tests.parity.published_rows import (
    Difference,
    Measured,
    append,
    begin,
    choose_rows,
    describe_commit,
    parse_part,
    read_measured,
)
from tests.parity.training import Row

NAMES = [f"row {number}" for number in range(10)]
MACHINE = {"date": "2026-01-02", "python": "3", "echelon": "0", "torch": "2", "transformers": "5", "processor": "one",
           "cores": 2, "source": "abc", "commit": "0123456789ab"}  # fmt: skip
MEASURED = Measured(Row("fsdp", ranks=2), Difference(1e-6, 2e-7, 3e-5, 4e-4), True, 1.5, MACHINE)


def test_rows_are_read_back_and_the_last_one_counts(tmp_path):
    path = tmp_path / "there" / "rows.jsonl"
    begin(path, MACHINE)
    append(path, replace(MEASURED, equal=False))
    append(path, MEASURED)
    begin(path, {**MACHINE, "cores": 8})
    append(path, replace(MEASURED, row=Row()))
    assert read_measured([path]) == [MEASURED, replace(MEASURED, row=Row(), environment={**MACHINE, "cores": 8})]
    assert read_measured([tmp_path / "absent.jsonl"]) == []


def test_a_run_resumes_after_a_partial_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    begin(path, MACHINE)
    append(path, MEASURED)
    path.write_text(path.read_text()[:-9])
    assert read_measured([path]) == []
    append(path, MEASURED)
    assert read_measured([path]) == [MEASURED]


def test_parts_are_disjoint_and_complete():
    parts = [choose_rows([*NAMES, NAMES[0]], [], "abc", (number, 3)) for number in (1, 2, 3)]
    assert sum(map(len, parts)) == len(NAMES) and set().union(*parts) == set(NAMES)


def test_existing_rows_are_skipped_unless_failed_or_of_other_source():
    names = [*NAMES, MEASURED.name]
    assert choose_rows(names, [MEASURED], "abc", (1, 1)) == set(NAMES)
    assert choose_rows(names, [replace(MEASURED, equal=False)], "abc", (1, 1)) == set(names)
    assert choose_rows(names, [MEASURED], "def", (1, 1)) == set(names)


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b"])
def test_an_invalid_part_is_refused(text):
    assert parse_part("4/4") == (4, 4)
    with pytest.raises(ValueError):
        parse_part(text)


def test_the_page_has_the_largest_difference_of_each_group(tmp_path, monkeypatch, capsys):
    begin(tmp_path / "rows.jsonl", MACHINE)
    for family, loss in (("llama", 1e-7), ("qwen3", 9e-7)):
        row, difference = Row(family=family), Difference(1e-6, loss, 3e-5, 4e-4)
        append(tmp_path / "rows.jsonl", replace(MEASURED, row=row, difference=difference))
    append(tmp_path / "rows.jsonl", replace(MEASURED, equal=False))
    begin(tmp_path / "old.jsonl", {**MACHINE, "source": "older"})
    append(tmp_path / "old.jsonl", replace(MEASURED, row=Row("zero1", ranks=4)))
    files = [str(tmp_path / name) for name in ("old.jsonl", "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", ["parity_table.py", *files, "--out", str(tmp_path / "page.md")])
    parity_table.main()
    told = capsys.readouterr().out
    assert "skipped 1 rows measured with other source" in told and "3 rows, 2 of them equal" in told
    page = (tmp_path / "page.md").read_text()
    assert "Divided models" not in page
    assert "echelon 0 at commit 0123456789ab; 2026-01-02" in page
    assert "| DDP | 1 | fp32 | 2 | 9.0e-07 | 3.0e-05 | 4.0e-04 |" in page
    assert "| FSDP | 2 | fp32 | 1 | 2.0e-07 |" in page and "ZeRO-1" not in page
    assert "partial" in page and f"- {MEASURED.name}: loss 1.0e-06 (at most 2e-05)" in page


def test_rows_with_model_parallelism_have_tables_of_their_own(tmp_path, monkeypatch):
    """They may have been measured with other source than the strategies."""
    begin(tmp_path / "rows.jsonl", MACHINE)
    append(tmp_path / "rows.jsonl", MEASURED)
    begin(tmp_path / "rows.jsonl", {**MACHINE, "source": "newer"})
    for parallel, adapter in (
        ({"pp": 2, "tp": 2, "sequence_parallel": True}, "full"), ({"cp": 2, "dp_shard": 2}, "lora")
    ):  # fmt: skip
        append(tmp_path / "rows.jsonl", replace(MEASURED, row=Row(parallel, ranks=4, adapter=adapter)))
    monkeypatch.setattr(
        sys, "argv", ["parity_table.py", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "page.md")]
    )
    parity_table.main()
    page = (tmp_path / "page.md").read_text()
    assert "| FSDP | 2 | fp32 | 1 | 2.0e-07 |" in page and "Measured: 2 rows, of which 2 are within" in page
    assert "| pp 2 (1f1b), tp 2 (sequence parallel) | 4 | fp32 | 1 | 2.0e-07 | 3.0e-05 | 4.0e-04 |" in page
    assert "| dp_shard 2, cp 2 (allgather) | 4 | fp32 |" in page and "| llama | lora | fp32 | 1 |" in page


def test_the_measured_commit_is_named_and_changes_of_its_source_are_said(tmp_path):
    assert describe_commit(tmp_path) == ""
    source = tmp_path / "src" / "echelon" / "parallel" / "tensor.py"
    source.parent.mkdir(parents=True)
    source.write_text("1\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    commit = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True).stdout[:12]
    (tmp_path / "README.md").write_text("not measured\n")
    assert describe_commit(tmp_path) == commit
    source.write_text("2\n")
    assert describe_commit(tmp_path) == f"{commit}-dirty"
