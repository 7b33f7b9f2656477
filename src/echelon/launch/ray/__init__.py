"""`--to ray`: a job of Ray Jobs on a running cluster, and its driver there. ray is imported to talk to a cluster."""
