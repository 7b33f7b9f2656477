"""One checkpoint format for every strategy and number of ranks, published atomically."""
