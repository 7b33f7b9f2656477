"""Start, watch and restart the processes of a machine, in agreement with the other machines of a job."""
