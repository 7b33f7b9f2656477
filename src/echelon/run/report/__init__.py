"""`echelon report`: what a run did, from its files alone. No torch."""
