"""How replicas agree: the protocol, and the synchronizers that implement it."""
