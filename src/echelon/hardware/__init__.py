"""What hardware there is: known accelerators and machine types, and what this machine has."""
