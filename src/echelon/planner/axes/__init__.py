"""The axes of parallelism: what the planner knows of each one stands in one file; `table.py` lists them."""
