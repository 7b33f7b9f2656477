"""One rank of a model that trains, as a library."""
