"""The plots of a sweep, by Optuna's own drawing on matplotlib."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.sweep.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from optuna import Study

_DPI = 120


def draw_plots(study: "Study", metric: str, folder: SweepFolder) -> tuple[list[Path], list[str]]:
    """Draw history, parallel coordinates and importance; what was written, and why what is missing is.

    For a study with a trial that is done. Importance is fANOVA's share of the variance (Hutter, Hoos, Leyton-Brown,
    ICML 2014), whose forest is drawn with a fixed seed.
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
            except (ValueError, RuntimeError, ZeroDivisionError) as error:  # as Optuna says that there is too little
                missing.append(f"no {path.name}: {str(error).splitlines()[0] if str(error) else error!r}")
                continue
        axes.figure.set_size_inches(10, 6)
        axes.figure.savefig(path, dpi=_DPI, bbox_inches="tight")
        written.append(path)
    from matplotlib import pyplot

    pyplot.close("all")
    return written, missing
