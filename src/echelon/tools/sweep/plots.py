"""The plots of a sweep, drawn by Optuna with matplotlib."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.tools.sweep.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from optuna import Study

_DPI = 120


def draw_plots(study: "Study", metric: str, folder: SweepFolder) -> tuple[list[Path], list[str]]:
    """Draw history, parallel coordinates and importance; returns the files written, and a line per missing plot.

    Requires a study with a completed trial. Importance is the share of variance by fANOVA (Hutter, Hoos, Leyton-Brown,
    ICML 2014), whose random forest has a fixed seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from optuna.exceptions import ExperimentalWarning
    from optuna.importance import FanovaImportanceEvaluator
    from optuna.visualization import matplotlib as drawing

    def importance(study: "Study", target_name: str) -> Any:
        return drawing.plot_param_importances(
            study, evaluator=FanovaImportanceEvaluator(seed=0), target_name=target_name
        )

    plots: dict[str, Callable[..., Any]] = {
        "history": drawing.plot_optimization_history,
        "parallel_coordinates": drawing.plot_parallel_coordinate,
        "importance": importance,
    }
    written, missing = [], []
    for name, draw in plots.items():
        path = folder.path / f"{name}.png"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            try:
                axes = draw(study, target_name=metric)
            except (ValueError, RuntimeError, ZeroDivisionError) as error:  # Optuna has too little data
                missing.append(f"no {path.name}: {str(error).splitlines()[0] if str(error) else error!r}")
                continue
        axes.figure.set_size_inches(10, 6)
        axes.figure.savefig(path, dpi=_DPI, bbox_inches="tight")
        written.append(path)
    from matplotlib import pyplot

    pyplot.close("all")
    return written, missing
