"""The planner: what a plan needs (memory) and which plan a recipe gets (layout, choose). No torch anywhere in it."""

from echelon.planner.memory import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
