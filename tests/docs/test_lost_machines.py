"""The table of who starts a lost machine again: a row for each target, whose quoted words its launcher has."""

import re
from pathlib import Path

import echelon.launch
from echelon.launch.kubernetes.pod import KINDS
from echelon.recipe.names import LAUNCHERS

LAUNCH = Path(echelon.launch.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "elastic.md"
SOURCES = {"torchrun": "ssh*", "kubernetes": "kubernetes/*", "ray": "ray/*", "sagemaker": "sagemaker/*"}
FOREIGN = {"dstack", "torchrun of PyTorch", "mpirun, horovodrun, own srun"}
# Words of others: of the user's commands, of the recipe, and of what a recipe may add.
OTHERS = {"echelon doctor", "kubectl cordon", "ray stop", "max_restarts_on_errors", "max_wait_hours"}


def read_rows() -> dict[str, str]:
    """The text of each row by its target."""
    section = (
        PAGE.read_text(encoding="utf-8").partition("## Who starts a lost machine again\n")[2].partition("\n## ")[0]
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
