"""The commands, one file each. Heavy imports are inside the functions, so that `--help` is fast."""
