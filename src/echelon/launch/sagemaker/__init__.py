"""`--to sagemaker`: a training job of Amazon SageMaker AI. Rendering a job needs no AWS package.

Nothing is imported here: `installing.py` runs in a container before its packages are installed.
"""
