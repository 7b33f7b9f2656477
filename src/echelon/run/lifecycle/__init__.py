"""The lifecycle of `echelon train`: checks, preparation, processes, outcome."""
