"""The cost of a run, hours times the price of its machines over all its starts, and the budget that limits it."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from echelon.ground.errors import ConfigError, MissingSettingError, StoppedError
from echelon.ground.sizes import render_duration
from echelon.ground.stop_request import LIMITS
from echelon.ground.stored import read_as, write_json
from echelon.planner.hardware.instances import Instance, Price, list_instances
from echelon.planner.hardware.job_machines import find_machines
from echelon.run.folder.run_folder import RunFolder

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe
    from echelon.recipe.operation import BudgetConfig

_RECENT_STEPS = 50
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Rate:
    """The price of one machine in dollars per hour, and its source.

    `at_most`: it is the price on demand of a spot machine, which costs less. `spot`: what a spot machine cost lately.
    """

    usd_per_hour: float
    source: str
    at_most: bool = False
    spot: Price | None = None

    def describe(self, num_machines: int = 1) -> str:
        """`$12.29/h x 2 machines (budget.usd_per_hour)`, after "at most" if it is an upper bound."""
        machines = f" x {num_machines} machines" if num_machines > 1 else ""
        return f"{'at most ' if self.at_most else ''}${self.usd_per_hour:g}/h{machines} ({self.source})"


@dataclass(frozen=True)
class Spending:
    """Time and money used by all starts of a run, the content of spending.json.

    Attributes:
        seconds: time of the run on its machines: from the command of each start to the last time it was known to work.
        usd: dollars, as far as the price was known.
        unpriced_machine_seconds: seconds times machines without a known price; a later start with a price adds them.
        until: time of the last update, in UTC seconds.
        reserve_seconds: estimated time that a stop with a save needs, at the last update.
    """

    seconds: float = 0.0
    usd: float = 0.0
    unpriced_machine_seconds: float = 0.0
    until: float = 0.0
    reserve_seconds: float = 0.0

    def grown(self, seconds: float, num_machines: int, rate: Rate | None) -> "Spending":
        """Return the spending after `seconds` more on these machines. A price also applies to unpriced time."""
        unpriced = self.unpriced_machine_seconds + seconds * num_machines
        if rate is None:
            return replace(self, seconds=self.seconds + seconds, unpriced_machine_seconds=unpriced)
        usd = self.usd + unpriced * rate.usd_per_hour / 3600
        return replace(self, seconds=self.seconds + seconds, usd=usd, unpriced_machine_seconds=0.0)

    def exceeds(self, budget: "BudgetConfig") -> str | None:
        """Return the member of LIMITS that is reached, or None."""
        if budget.max_hours is not None and self.seconds >= 3600 * budget.max_hours:
            return LIMITS[0]
        if budget.max_usd is not None and self.usd >= budget.max_usd:
            return LIMITS[1]
        return None


def read_spending(folder: RunFolder) -> Spending:
    """Read what the run has used so far; zero if it has not started. Raises ConfigError for a damaged file."""
    path = folder.spending_path
    if not path.exists():
        return Spending()
    try:
        amounts = read_as(path, dict[str, _Amount])
        if names := asdict(Spending()).keys() ^ amounts.keys():
            raise ValueError(f"{min(names)}: missing or unknown key")
        return Spending(**amounts)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot read what the run has used so far ({error}); restore it, or remove it to count from zero."
        ) from error


def forget_damaged_spending(recipe: "Recipe", folder: RunFolder) -> str | None:
    """Remove a damaged spending.json if the recipe has no budget; return a line about that.

    Raises ConfigError if the recipe has a budget: counting from zero would allow it to be spent again.
    """
    try:
        read_spending(folder)
    except ConfigError as error:
        if recipe.budget.max_usd is not None or recipe.budget.max_hours is not None:
            raise
        folder.spending_path.unlink()
        return f"{folder.spending_path} cannot be read ({error.__cause__}); usage is counted from zero"
    return None


def write_spending(folder: RunFolder, spending: Spending) -> None:
    """Replace the run's spending.json. Raises OSError."""
    write_json(folder.spending_path, asdict(spending))


def find_price_here(recipe: "Recipe", variables: Mapping[str, str]) -> Rate | None:
    """Return the price of the machine that this process runs on: from the recipe, or of its SageMaker instance type.

    `variables` is the environment. The container names its instance type, else the recipe does.
    """
    settings = recipe.launch.sagemaker
    if "TRAINING_JOB_NAME" in variables and settings.instance_groups:
        return find_price_at_target(recipe)
    name = variables.get("SM_CURRENT_INSTANCE_TYPE")
    if name is None and "TRAINING_JOB_NAME" in variables:
        name = settings.instance_type
    instance = None if name is None else list_instances(settings.region).get(name)
    return _find_rate(recipe, name, instance)


def find_price_at_target(recipe: "Recipe") -> Rate | None:
    """Return the price of one machine at the launch target; of several types their mean."""
    settings = recipe.launch.sagemaker
    if recipe.launch.to != "sagemaker" or not (settings.instance_groups or settings.instance_type):
        return _find_rate(recipe, None, None)
    machines = find_machines(recipe.launch)
    return _find_rate(recipe, machines.weakest.name, machines.weakest)


def check_budget(recipe: "Recipe", rate: Rate | None) -> None:
    """Raise ConfigError if there is a budget in dollars and the price is unknown."""
    if recipe.budget.max_usd is not None and rate is None:
        raise MissingSettingError(
            f"budget.max_usd={recipe.budget.max_usd:g}: the price of these machines is unknown; set "
            "budget.usd_per_hour, the price of one machine, or use budget.max_hours.",
            {"budget.max_usd": None},
        )


def refuse_used_up(recipe: "Recipe", folder: RunFolder, rate: Rate | None, num_machines: int) -> None:
    """Raise StoppedError if the remaining budget is only enough to start and save again."""
    spending = read_spending(folder)
    if not spending.seconds:
        return
    limit = spending.grown(spending.reserve_seconds, num_machines, rate).exceeds(recipe.budget)
    if limit is not None:
        dollars = f" and ${spending.usd:.2f}" if spending.usd else ""
        raise StoppedError(
            f"stopped by {name_limit(recipe.budget, limit)}: all starts of the run have used "
            f"{render_duration(spending.seconds)}{dollars}, which leaves no time to train and save; raise it to "
            "continue"
        )


def name_limit(budget: "BudgetConfig", limit: str) -> str:
    """Return a member of LIMITS with its value, as in `budget.max_hours=2`."""
    return f"{limit}={getattr(budget, limit.removeprefix('budget.')):g}"


def describe_cost(
    recipe: "Recipe", folder: RunFolder, rate: Rate | None, num_machines: int, num_steps: int | None
) -> list[str]:
    """Return lines for the user about the expected cost of the run; none without a price and a budget.

    The estimate uses the time per sequence of the run's own last steps. `num_steps` is None if it depends on the text.
    """
    budget, spent = recipe.budget, read_spending(folder)
    lines = []
    if rate is not None:
        hourly = rate.describe(num_machines)
        if rate.at_most:
            if rate.spot is not None:
                hourly += f"; a spot machine cost {rate.spot.describe()}; budget.spot_usd_per_hour counts that"
            else:
                hourly += "; spot machines cost less: echelon plan --prices spot finds their price"
        seconds = None if num_steps is None else _estimate_seconds(recipe, folder, num_steps)
        so_far = f"; ${spent.usd:.2f} in {render_duration(spent.seconds)} so far" if spent.seconds else ""
        if seconds is None:
            lines.append(f"cost: {hourly}; the duration is unknown until steps are measured{so_far}")
        else:
            usd = seconds / 3600 * rate.usd_per_hour * num_machines
            lines.append(
                f"cost: {hourly}; the remaining steps take {render_duration(seconds)} at this run's speed, "
                f"{'at most ' if rate.at_most else ''}${usd:.2f}{so_far}"
            )
    limits = [
        name_limit(budget, limit) for limit in LIMITS if getattr(budget, limit.removeprefix("budget.")) is not None
    ]
    if limits:
        used = f" of which {render_duration(spent.seconds)} are used," if spent.seconds else ""
        lines.append(f"budget: stops with a checkpoint before {' or '.join(limits)},{used} all starts counted together")
        if rate is not None and rate.at_most and budget.max_usd is not None:
            lines[-1] += "; budget.max_usd counts the price on demand, so less than that is paid"
    return lines


def _estimate_seconds(recipe: "Recipe", folder: RunFolder, num_steps: int) -> float | None:
    """Estimate the time of the remaining steps, from the median time per sequence of the run's last steps."""
    rows = (row for row in folder.rows.rows_backwards() if row.get("kind") == "train" and row.get("step_seconds"))
    if not (recent := list(islice(rows, _RECENT_STEPS))):
        return None
    fed = recipe.batches.first_sequence
    paces: list[float] = [row["step_seconds"] / (fed(row["step"]) - fed(row["step"] - 1)) for row in recent]
    return statistics.median(paces) * max(0, fed(num_steps) - fed(int(recent[0]["step"])))


def _find_rate(recipe: "Recipe", name: str | None, instance: Instance | None) -> Rate | None:
    """The price of a machine of this type, or of any machine if `name` is None."""
    budget, settings = recipe.budget, recipe.launch.sagemaker
    price = None if instance is None else instance.price
    on_demand = None if price is None else Rate(price.usd_per_hour, f"{name} on demand, {price.terms}")
    if price is not None and price.region and settings.region not in (None, price.region):
        terms = f"{name} on demand, {price.terms}; not the price in {settings.region}, where the job runs"
        on_demand = Rate(price.usd_per_hour, terms)
    if budget.usd_per_hour is not None:
        on_demand = Rate(budget.usd_per_hour, "budget.usd_per_hour")
    if settings.spot is None or name is None:
        return on_demand
    if budget.spot_usd_per_hour is not None:
        bound = "" if on_demand is None else f"; at most ${on_demand.usd_per_hour:g}/h, {on_demand.source}"
        return Rate(budget.spot_usd_per_hour, f"budget.spot_usd_per_hour{bound}")
    if on_demand is None or budget.usd_per_hour is not None:
        return on_demand
    return replace(on_demand, at_most=True, spot=None if instance is None else instance.spot)
