"""One checkpoint format for every strategy and number of ranks, published whole or not at all."""
