"""Measure this machine, and keep the result for later plans."""

from pathlib import Path

from echelon.ground.errors import LaunchError
from echelon.ground.launch_environment import worker_environment
from echelon.ground.variables import find_cache_dir
from echelon.planner.hardware.calibrate import measure_machine
from echelon.planner.hardware.calibration_store import Calibration, store_calibration
from echelon.planner.measured_rates import fit_calibration


def calibrate() -> tuple[Calibration, Path]:
    """Measure matrix products, attention, layers, copies and all-reduces between the devices of this machine.

    It takes less than a minute on a machine without other work. Later plans for devices like these use the result.

    Returns:
        What was measured, and the file in which it is kept.

    Raises:
        LaunchError: the processes that measure failed, or the file cannot be written.
    """
    rows, device, count = measure_machine(worker_environment)
    found = fit_calibration(rows, device, count, "float32" if device == "cpu" else "bfloat16")
    try:
        return found, store_calibration(find_cache_dir(), found)
    except OSError as error:
        raise LaunchError(
            f"the calibration cannot be kept in {find_cache_dir()} ({error}); set ECHELON_CACHE to a folder that can "
            "be written."
        ) from error
