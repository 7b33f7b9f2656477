"""`--to kubernetes`: a job of a Kubeflow operator or of SageMaker HyperPod's, submitted with the official client."""

from echelon.launch.kubernetes.launcher import KubernetesLauncher

__all__ = ["KubernetesLauncher"]
