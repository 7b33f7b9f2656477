"""Start the processes of a run, on this machine or elsewhere. Nothing here imports torch until a job starts.

May import: ground, recipe, planner, learn, run, foreign; no torch at the top of a module.
"""
