"""Processes: where a launcher put them, their groups and their mesh."""
