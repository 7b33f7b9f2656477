"""`--to sagemaker`: a training job of Amazon SageMaker AI. Rendering a job needs no AWS package."""

from echelon.launch.sagemaker.launcher import SageMakerLauncher

__all__ = ["SageMakerLauncher"]
