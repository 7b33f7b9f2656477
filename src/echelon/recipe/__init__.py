"""The recipe of a run, as a frozen value. `document` has all of it, `load`, `render` and `difference` read, write and
compare recipes.

May import: ground; no torch at the top of a module.
"""
