"""The planner: estimates the memory of a plan, and resolves the plan of a recipe (layout, choose). Needs no torch.

May import: ground, recipe; no torch at the top of a module.
"""
