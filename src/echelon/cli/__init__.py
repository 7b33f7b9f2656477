"""The command line and the functions of `import echelon`.

May import: everything.
"""
