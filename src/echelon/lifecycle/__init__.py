"""The life of `echelon train`: checks, preparation, the processes, the end."""
