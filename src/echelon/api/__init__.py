"""What `import echelon` offers: the commands as functions, and a run's folder as an object."""
