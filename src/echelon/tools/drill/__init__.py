"""A drill: a small version of the user's recipe, into which the faults of long runs are injected."""
