"""Tools around runs: evaluation, sampling, sweeps, drills, the doctor.

May import: ground, recipe, planner, learn, run, launch.
"""
