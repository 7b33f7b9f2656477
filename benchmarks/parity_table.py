"""Writes docs/parity.md, the differences between every strategy and the single process, from the parity tests' results.

    python benchmarks/parity_table.py [RESULTS.jsonl ...]

reads the results of `pytest tests/parity --publish RESULTS.jsonl` and writes the page; `make parity-table` does both.
Results from several machines are passed together. Rows measured with older source are skipped with a message.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.parity.parity_rows import COVERING, FULL, OPTIMIZERS, PRECISIONS  # noqa: E402
from tests.parity.published_rows import Measured, read_measured  # noqa: E402
from tests.parity.training import GLOBAL_BATCH, bounds  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "parity-cpu.jsonl"
PAGE = ROOT / "docs" / "parity.md"
STRATEGIES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "fsdp": "FSDP", "hsdp": "HSDP"}
PARTS = {"loss_share": "loss, relative", "norm": "gradient norm, relative", "weight": "weight, absolute"}
HEAD = """\
# Every strategy against the single process

`benchmarks/parity_table.py` writes this page from `benchmarks/results/parity-cpu.jsonl`, which lists every row with its
options. A row is a run of 4 steps in real processes, compared step by step with a single process in fp32 that takes the
whole batch at once: see [strategies.md](strategies.md#what-the-same-means). The commit below is the one that was
measured; later commits are not, until the page is written again.

"""
COLUMNS = """\
Each difference is the largest of any row in the group: of a step's loss, relative to the reference; of a step's
gradient norm, relative; of any single weight after the last step, absolute.

Weights in 16 bits differ more than losses do. An update of AdamW, Muon or Lion has the size of the learning rate
(0.001 for AdamW) however small the gradient is, so a gradient near zero whose sign differs moves a weight by up to
twice that in a step. Weights that are stored in bf16 (`bf16_stochastic`) are multiples of 0.0078 above 1.

"""


DIVIDED = """\
## Divided models and sequences

Rows of `tests/parity/test_tensor.py`, `test_pipeline.py`, `test_context.py`, `test_expert_parallel.py` and
`test_tensor_experts.py`, compared in the same way, also with uneven targets. Axes that are not named are 1; on the
processes that are left, parameters are replicated. `make parity-table` measures all rows of these files; those that are
not counted here have not been measured at this commit.

"""
AXES = {
    "pp": "schedule", "dp_replicate": None, "dp_shard": None, "cp": "cp_method", "tp": "sequence_parallel", "ep": None,
}  # fmt: skip
DEFAULTS = {"schedule": "1f1b", "cp_method": "allgather"}


def render_page(measured: list[Measured], divided: list[Measured]) -> str:
    """The page. `divided`: rows with model parallelism; both lists were each measured with the same source."""
    failed = [each for each in (*measured, *divided) if not each.equal]
    lines = [
        *HEAD.splitlines(),
        *_render_coverage(measured),
        "",
        *_render_machines(measured),
        "",
        *COLUMNS.splitlines(),
    ]
    places = [(_place(each), each) for each in measured]
    lines += ["## By strategy, processes and precision", ""]
    lines += _render_table(("strategy", "processes", "precision"), places)
    lines += ["", "## By option", "", *_render_table(("option", "value", "precision"), _by_option(measured))]
    if divided:
        lines += ["", *DIVIDED.splitlines(), *_render_divided(divided)]
    if failed:
        lines += ["", "## Not equal", "", *(f"- {each.name}: {_describe(each)}" for each in failed)]
    return "\n".join(lines) + "\n"


def _render_coverage(measured: list[Measured]) -> list[str]:
    names = {each.name for each in measured}
    counts = [
        (rows, sum(str(row) in names for row in {str(row) for row in rows}), len({str(row) for row in rows}))
        for rows in (FULL, COVERING, OPTIMIZERS + PRECISIONS)
    ]
    (_, product, whole), (_, pairs, all_pairs), (_, others, all_others) = counts
    lines = [
        f"Measured: {product:,} of the {whole:,} rows of the product of all options ({pairs} of the {all_pairs} that "
        f"`make test-all` runs), and {others} of the {all_others} rows of other optimizers and precisions.",
        f"{sum(each.equal for each in measured):,} of these {len(measured):,} rows are within their bounds, with the "
        "same batches and evaluations.",
    ]
    if product < whole:
        lines.append("This is a partial run: the missing rows were not measured.")
    return textwrap.wrap(" ".join(lines), 120)


def _render_machines(measured: list[Measured]) -> list[str]:
    """A line for each type of machine, set of versions and commit, with the dates of its measurements."""
    machines: dict[str, set[str]] = {}
    for each in measured:
        on = each.environment
        line = (
            f"{on['processor']}, {on['cores']} cores, Python {on['python']}, torch {on['torch']}, transformers "
            f"{on['transformers']}, echelon {on['echelon']} at commit {on.get('commit') or 'unknown'}"
        )
        machines.setdefault(line, set()).add(on["date"])
    return [f"- {line}; {' to '.join(sorted({min(days), max(days)}))}" for line, days in sorted(machines.items())]


def _place(measured: Measured) -> tuple[str, ...]:
    """The key of a row in the first table."""
    return STRATEGIES[measured.row.parallel], str(measured.row.ranks), measured.row.precision


def _render_divided(divided: list[Measured]) -> list[str]:
    """How many rows were compared and where, and a table by axes and by model."""
    equal = sum(each.equal for each in divided)
    words = f"Measured: {len(divided)} rows, of which {equal} are within their bounds."
    places = [((_name_axes(each.row.parallel), str(each.row.ranks), each.row.precision), each) for each in divided]
    models = [((each.row.family, each.row.adapter, each.row.precision), each) for each in divided]
    return [
        words,
        "",
        *_render_machines(divided),
        "",
        *_render_table(("axes", "processes", "precision"), places),
        "",
        *_render_table(("model", "adapter", "precision"), models),
    ]


def _name_axes(parallel: Mapping[str, Any]) -> str:
    """The degrees above 1 with their options: `pp 2 (1f1b), tp 2 (sequence parallel)`."""
    words = []
    for axis, option in AXES.items():
        if parallel.get(axis, 1) > 1:
            value = parallel.get(option, DEFAULTS.get(option)) if option else None
            name = "sequence parallel" if value is True else value
            words.append(f"{axis} {parallel[axis]}" + (f" ({name})" if name else ""))
    return ", ".join(words)


def _by_option(measured: Iterable[Measured]) -> list[tuple[tuple[str, ...], Measured]]:
    """Each row under each of its options."""
    found = []
    for each in measured:
        row = each.row
        options = {
            "model": f"{row.family}, {'tied' if row.tied else 'untied'}",
            "activation checkpointing": row.checkpointing,
            "compile": "on" if row.compile else "off",
            "optimizer": row.optimizer,
            "master weights": row.master_weights,
            "microbatches": str(GLOBAL_BATCH // row.ranks // row.micro_batch),
        }
        found += [((name, value, row.precision), each) for name, value in options.items()]
    return found


def _render_table(heads: tuple[str, ...], rows: list[tuple[tuple[str, ...], Measured]]) -> list[str]:
    """A line for each key, in order, with the largest differences of its rows."""
    groups: dict[tuple[str, ...], list[Measured]] = {}
    for key, measured in sorted(rows, key=lambda row: [_sort_key(part) for part in row[0]]):
        groups.setdefault(key, []).append(measured)
    lines = [f"| {' | '.join((*heads, 'rows', *PARTS.values()))} |", "|---" * (len(heads) + 1 + len(PARTS)) + "|"]
    for key, group in groups.items():
        largest = [max(getattr(each.difference, part) for each in group) for part in PARTS]
        lines.append(f"| {' | '.join((*key, str(len(group)), *(f'{value:.1e}' for value in largest)))} |")
    return lines


def _sort_key(word: str) -> tuple[int, str]:
    """Strategies in a fixed order, everything else by name."""
    names = list(STRATEGIES.values())
    return (names.index(word), "") if word in names else (len(names), word)


def _describe(measured: Measured) -> str:
    difference, (loss, norm) = measured.difference, bounds(measured.row)
    return f"loss {difference.loss:.1e} (at most {loss:g}), norm {difference.norm:.1e} (at most {norm:g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", default=[RESULTS], help="files written by --publish")
    parser.add_argument("--out", type=Path, default=PAGE, help="path of the page")
    arguments = parser.parse_args()
    measured = read_measured(arguments.results)
    if not measured:
        sys.exit(f"no rows in {', '.join(map(str, arguments.results))}; run `make parity-table`")
    strategies, divided = map(keep_newest, split_rows(measured))
    arguments.out.write_text(render_page(strategies, divided), encoding="utf-8")
    kept = [*strategies, *divided]
    print(f"{arguments.out}: {len(kept)} rows, {sum(each.equal for each in kept)} of them equal")


def split_rows(measured: list[Measured]) -> tuple[list[Measured], list[Measured]]:
    """(rows of named strategies, rows with model parallelism)."""
    is_named = [isinstance(each.row.parallel, str) for each in measured]
    rows = list(zip(measured, is_named, strict=True))
    return [each for each, named in rows if named], [each for each, named in rows if not named]


def keep_newest(measured: list[Measured]) -> list[Measured]:
    """The rows that were measured with the source of the last one; a message says how many were not."""
    newest = measured[-1].environment["source"] if measured else ""
    kept = [each for each in measured if each.environment["source"] == newest]
    if len(kept) < len(measured):
        print(f"skipped {len(measured) - len(kept)} rows measured with other source than {newest}; measure them again")
    return kept


if __name__ == "__main__":
    main()
