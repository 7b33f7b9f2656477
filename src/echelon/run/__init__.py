"""A run of many processes: its folder, its loop, its records, its report, and the processes themselves.

May import: ground, recipe, planner, learn.
"""
