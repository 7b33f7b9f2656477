"""What every part stands on: errors, logs, small files, signals, the variables of launchers.

May import: nothing of echelon, and no torch at the top of a module.
"""
