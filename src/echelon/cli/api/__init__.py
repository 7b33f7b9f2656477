"""The public Python interface of `import echelon`: the commands as functions, and `Run` for a run's folder."""
