"""The record of a run: journal, console, goodput, cost, trackers."""
