"""The planner: estimates the memory of a plan, and resolves the plan of a recipe (layout, choose). Needs no torch."""

from echelon.planner.memory import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
