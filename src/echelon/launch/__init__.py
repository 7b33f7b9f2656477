"""Start the processes of a run, on this machine or elsewhere. Nothing here imports torch until a job starts."""
