"""The commands, in a file each. Imports of substance are inside them, so that `--help` answers at once."""
