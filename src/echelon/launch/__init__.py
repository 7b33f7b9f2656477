"""Starting the processes of a run, on this machine or elsewhere. Nothing here needs torch until a job starts."""
