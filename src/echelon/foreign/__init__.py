"""What speaks another tool's language: DeepSpeed, Horovod, TensorFlow, imported recipes, the keys of SMP.

May import: ground, recipe, planner, learn. Others find it by name, in tables.
"""
