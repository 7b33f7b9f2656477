"""The options of `echelon plan`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from echelon.ground.errors import ConfigError

PlannedRecipe = Annotated[Path | None, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
Devices = Annotated[
    str | None, typer.Option("--devices", metavar="64xH100", help="Plan for these devices. Default: this machine.")
]
DevicesPerNode = Annotated[int, typer.Option("--devices-per-node", help="Number of devices per machine.")]
Instance = Annotated[
    str | None,
    typer.Option("--instance", metavar="ml.TYPE|auto", help="Plan for SageMaker machines; auto: the cheapest type."),
]
Count = Annotated[
    int | None,
    typer.Option(
        "--count",
        min=1,
        help="Number of machines, with --instance (default 1; with auto: as few as possible) or --quote (1, 2, 4, 8).",
    ),
]
Build = Annotated[
    bool, typer.Option("--build", help="Divide the real model as planned, without devices, and count what ranks store.")
]
By = Annotated[
    Literal["time", "cost", "memory"] | None,
    typer.Option("--by", help="Search all plans that the recipe allows, and rank them by this."),
]
BudgetUsd = Annotated[
    float | None, typer.Option("--budget-usd", min=0, help="Search plans whose run costs at most this.")
]
DeadlineHours = Annotated[
    float | None, typer.Option("--deadline-hours", min=0, help="Search plans whose run takes at most this.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Search, and print the candidates as JSON.")]
Engines = Annotated[bool, typer.Option("--engines", help="Also show what each engine would make of the recipe.")]
Accuracy = Annotated[
    bool, typer.Option("--accuracy", help="Compare runs with what was predicted: the arguments are run folders.")
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Measure this machine first, in under a minute; later plans use the result.")
]
Prices = Annotated[
    Literal["refresh", "spot"] | None,
    typer.Option(
        "--prices", help="First ask AWS for today's prices; spot: also of spot machines. Later plans use them."
    ),
]
Scaling = Annotated[
    str | None, typer.Option("--scaling", metavar="8,16,32", help="Plan for each of these numbers of devices.")
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the search or the scaling into this file.")
]
MtbfHours = Annotated[
    float | None,
    typer.Option("--mtbf-hours", min=0, max=1e9, help="Mean hours between failures of a machine: show the goodput."),
]
RestartSeconds = Annotated[
    float | None,
    typer.Option("--restart-seconds", min=0, max=1e9, help="From a failure to the next step. Default: 300."),
]
ReplaceHours = Annotated[
    float | None,
    typer.Option(
        "--replace-hours",
        min=0,
        max=1e9,
        help="Until a failed machine is replaced: show the goodput with spare machines.",
    ),
]
StepSpread = Annotated[
    float | None,
    typer.Option(
        "--step-spread",
        min=0,
        max=1000,
        help="Standard deviation of a machine's step time over its mean: show the goodput.",
    ),
]
Quote = Annotated[
    bool, typer.Option("--quote", help="Show hours and dollars on every instance type, each with an error bar.")
]
Accept = Annotated[
    int | None,
    typer.Option("--accept", metavar="N", min=1, help="Launch quote N; the end of its error bar is the budget."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="With --accept: print what would be submitted, and submit nothing.")
]


def parse_counts(text: str) -> list[int]:
    """Parse `--scaling 8,16,32`, numbers of devices. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        taken = f" ({text} was taken for its value)" if text.startswith("-") else ""
        raise ConfigError(
            f"--scaling {text} is not a list of numbers of devices{taken}; write it like --scaling 8,16,32,64."
        )
    return [int(word) for word in words]
