"""`--to kubernetes`: a job of a Kubeflow operator or of SageMaker HyperPod's, submitted with the official client."""
