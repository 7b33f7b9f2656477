"""Hardware: known accelerators and machine types, and detection of this machine's hardware."""
