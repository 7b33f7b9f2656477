"""What a run minimizes."""
