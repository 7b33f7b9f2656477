"""The tables of strategies and of lost machines against what `echelon plan` accepts and launchers have."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

import echelon.launch
from echelon.ground.errors import EchelonError
from echelon.launch.kubernetes.manifest import KINDS
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.shape import build_shape
from echelon.recipe.load import build_recipe
from echelon.recipe.names import LAUNCHERS

PAGE = Path(__file__).parents[2] / "docs" / "choosing-a-strategy.md"

DENSE = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
MIXTURE = {**DENSE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

COLUMNS: dict[str, dict[str, Any]] = {
    "tp": {"parallel": {"tp": 2}},
    "pp": {"parallel": {"pp": 2}},
    "cp": {"parallel": {"cp": 2}},
    "ep": {"parallel": {"dp_shard": 2, "ep": 2}, "model": {"config": MIXTURE}},
}
ROWS: dict[str, dict[str, Any]] = {
    "tp": {"parallel": {"tp": 2}},
    "sequence_parallel": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "pp, 1f1b or gpipe": {"parallel": {"pp": 2}},
    "pp, interleaved": {"parallel": {"pp": 2, "schedule": "interleaved"}},
    "pp, zero_bubble": {"parallel": {"pp": 2, "schedule": "zero_bubble"}},
    "cp, allgather": {"parallel": {"cp": 2}},
    "cp, ulysses": {"parallel": {"cp": 2, "cp_method": "ulysses"}},
    "cp, ring": {"parallel": {"cp": 2, "cp_method": "ring"}},
    "ep": {"parallel": {"dp_shard": 2, "ep": 2}, "model": {"config": MIXTURE}},
    "dp_replicate": {"parallel": {"dp_replicate": 2}},
    "dp_shard": {"parallel": {"dp_shard": 2}},
    "cpu_offload": {"parallel": {"dp_shard": 2, "cpu_offload": True}},
    "mixture of experts": {"model": {"config": MIXTURE}},
    "LoRA": {"adapter": {"method": "lora", "rank": 4}},
    "QLoRA": {"adapter": {"method": "qlora", "rank": 4}},
    "DPO, KTO": {"objective": {"name": "dpo"}, "data": {"train": [{"path": "pairs.jsonl"}]}},
    "ORPO, SimPO, CPO": {"objective": {"name": "simpo"}, "data": {"train": [{"path": "pairs.jsonl"}]}},
    "Muon": {"optim": {"name": "muon"}},
    "Adafactor": {"optim": {"name": "adafactor"}},
    "8-bit AdamW": {"optim": {"name": "adamw_8bit"}},
    "compile": {"train": {"compile": True}},
    "full checkpointing": {"train": {"activation_checkpointing": "full"}},
    "selective checkpointing": {"train": {"activation_checkpointing": "selective"}},
    "activation offloading": {"train": {"activation_offloading": True}},
}
AXES = ("tp", "pp", "cp", "dp_replicate", "dp_shard")
BASE = {
    "run": {"name": "matrix"},
    "model": {"config": DENSE},
    "data": {"train": "python-stdlib", "sequence_len": 64},
    "train": {"steps": 1, "global_batch_size": 32, "compile": False},
    "optim": {"learning_rate": 1e-3},
}


def combine(row: dict[str, Any], column: dict[str, Any]) -> dict[str, Any]:
    """A recipe with both; `column` has the model of the two that is a mixture."""
    recipe: dict[str, Any] = {"tokenizer": "bytes"}
    for each in (BASE, row, column):
        for section, keys in each.items():
            recipe[section] = {**recipe.get(section, {}), **keys}
    return recipe


def find_refusal(mapping: dict[str, Any]) -> str | None:
    """The message of a refusal on as many GPUs as the degrees make; None if the recipe is accepted."""
    config = mapping["model"]["config"]
    number = math.prod(mapping.get("parallel", {}).get(axis, 1) for axis in AXES)
    try:
        resolve_plan(build_recipe(mapping)[0], build_shape(config), parse_devices(f"{number}xH100"))
    except EchelonError as error:
        return str(error)
    return None


def read_table() -> tuple[dict[tuple[str, str], str], dict[str, str]]:
    """The cells of the page by row and column, and the reasons by number."""
    page = PAGE.read_text(encoding="utf-8").split("## What can be combined")[1]
    header, _, *lines = re.findall(r"^\|.*\|$", page, re.MULTILINE)
    names = [cell.strip(" `") for cell in header.strip("|").split("|")][1:]
    cells = {}
    for line in lines:
        row, *values = (cell.strip(" `") for cell in line.strip("|").split("|"))
        cells.update({(row, name): value for name, value in zip(names, values, strict=True)})
    return cells, dict(re.findall(r"^(\d)\. (.*?\.)$", page, re.MULTILINE))


def test_the_page_has_every_combination() -> None:
    assert set(read_table()[0]) == {(row, column) for row in ROWS for column in COLUMNS}


@pytest.mark.parametrize("column", COLUMNS)
def test_the_table_is_what_is_accepted(column: str) -> None:
    cells, reasons = read_table()
    for row, changes in ROWS.items():
        cell = cells[row, column]
        if row.partition(",")[0] == column or (row, column) == ("sequence_parallel", "tp"):
            assert cell == ""
            continue
        refusal = find_refusal(combine(changes, COLUMNS[column]))
        if cell == "yes":
            assert refusal is None, (row, refusal)
        else:
            assert refusal is not None and reasons[cell].split(": ")[1].rstrip(".") in refusal, (row, refusal)


LAUNCH = Path(echelon.launch.__file__).parent
ELASTIC = Path(__file__).parents[2] / "docs" / "elastic.md"
SOURCES = {"torchrun": "ssh*", "kubernetes": "kubernetes/*", "ray": "ray/*", "sagemaker": "sagemaker/*"}
FOREIGN = {"dstack", "torchrun of PyTorch", "mpirun, horovodrun, own srun"}
# Words of others: of the user's commands, of the recipe, and of what a recipe may add.
OTHERS = {"echelon doctor", "kubectl cordon", "ray stop", "max_restarts_on_errors", "max_wait_hours"}


def read_rows() -> dict[str, str]:
    """The text of each row by its target."""
    section = (
        ELASTIC.read_text(encoding="utf-8").partition("## Who starts a lost machine again\n")[2].partition("\n## ")[0]
    )
    lines = [line.strip("| ") for line in section.splitlines() if line.startswith("|")]
    return {target: rest for target, _, rest in (line.partition(" | ") for line in lines[2:])}


def test_every_target_has_a_row():
    kinds = {f"`kubernetes`, `{kind}`" for kind in KINDS}
    rows = {re.split(r", (?!`)", row)[0] if row.startswith("`") else row for row in read_rows()}
    assert rows == {f"`{name}`" for name in LAUNCHERS if name != "kubernetes"} | kinds | FOREIGN


def test_a_row_quotes_what_its_launcher_has():
    for target, text in read_rows().items():
        name = (re.findall("`(.+?)`", target) or [""])[0]
        if not name:
            continue
        files = [path for path in LAUNCH.glob(SOURCES.get(name, f"{name}*")) if path.suffix in (".py", ".sh", ".yaml")]
        source = "".join(path.read_text(encoding="utf-8") for path in files)
        for word in set(re.findall("`(.+?)`", text)) - OTHERS:
            assert files and re.search(rf"\b{word.removeprefix('fault.')}\b", source), (target, word)
