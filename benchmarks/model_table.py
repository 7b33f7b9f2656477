"""Takes every causal language model of the installed transformers through echelon, and writes docs/models.md.

`make model-table` runs it. Results are appended to a file of JSON lines as they come, so that an interrupted run
continues; models that were examined with this release of transformers are not examined again, unless with `--again`.
"""

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Collection, Iterable
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.parity.causal_models import Outcome, examine, read_outcomes  # noqa: E402
from tests.workers import WorkerPool  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "models.jsonl"
PAGE = ROOT / "docs" / "models.md"
HEAD = """\
# Model families

`make model-table` writes this page. It takes every class that `AutoModelForCausalLM` of the installed `transformers`
can build through echelon, at a small size: `transformers` saves it under the names that its checkpoints have on the
hub; echelon loads the folder whole and sharded over two FSDP processes, trains two steps, stops, resumes and exports;
`transformers` and echelon load the export.

A class *works* if all weights that either side loads are equal bit for bit, logits are equal, a resumed run equals an
uninterrupted one bit for bit, and `transformers` reports no missing and no unexpected weights in the export.
"""
TITLES = {
    "works": "Works",
    "refused": "Refused by echelon",
    "unbuilt": "Not examined: transformers alone cannot run a small model of the family",
    "wrong": "Does not work",
}
WIDTH = 120


def examine_all(path: Path, model_types: Iterable[str]) -> None:
    """Examine models one after another, and append each outcome to the file."""
    workers = WorkerPool(2)
    try:
        with tempfile.TemporaryDirectory() as folder, path.open("a") as file:
            for model_type in model_types:
                outcome = examine(model_type, workers, Path(folder) / model_type)
                print(f"{model_type}: {outcome.result} {outcome.cause}", flush=True)
                file.write(outcome.to_line())
                file.flush()
    finally:
        workers.close()


def render_page(outcomes: Collection[Outcome]) -> str:
    """The page: a list of the classes that work, and a table with the cause of each other one."""
    groups: dict[str, list[Outcome]] = {result: [] for result in TITLES}
    for outcome in sorted(outcomes, key=lambda each: (each.model_class.lower(), each.model_type)):
        groups[outcome.result].append(outcome)
    classes = {outcome.model_class for outcome in groups["works"]}
    versions = " and ".join(sorted({outcome.transformers for group in groups.values() for outcome in group}))
    counts = ", ".join(f"{result}: {len(group)}" for result, group in groups.items() if group)
    summary = (
        f"Measured with transformers {versions}: {len(outcomes)} model types ({counts}); {len(classes)} classes work."
    )
    lines = [HEAD, textwrap.fill(summary, WIDTH, break_on_hyphens=False), ""]
    for result, group in groups.items():
        if group:
            lines += [f"## {TITLES[result]}", "", *_render_group(group), ""]
    return "\n".join(lines).rstrip() + "\n"


def _render_group(group: list[Outcome]) -> list[str]:
    if group[0].result == "works":
        rows = [f"| {each.model_class} | `{each.model_type}` | {each.cause} |" for each in group]
        return ["| class | model_type | with |", "|---|---|---|", *rows]
    rows = [
        f"| {each.model_class} | `{each.model_type}` | {each.cause.replace('|', chr(92) + '|')} |" for each in group
    ]
    return ["| class | model_type | cause |", "|---|---|---|", *rows]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="only these; default: all")
    parser.add_argument("--again", action="store_true", help="also those with an outcome in the file")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    wanted = options.model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    known = {} if options.again else read_outcomes(options.results)
    examine_all(options.results, [each for each in wanted if each not in known])
    PAGE.write_text(render_page(read_outcomes(options.results).values()))


if __name__ == "__main__":
    main()
