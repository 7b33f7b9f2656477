"""The run folder and its files. Does not import torch."""
