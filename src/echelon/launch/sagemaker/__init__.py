"""`--to sagemaker`: a training job of Amazon SageMaker AI. Rendering a job needs no AWS package.

Nothing is imported here: `install.py` runs in a container before its packages are installed.
"""
