"""Starts training on one machine or many and starts it again after a fault: over SSH, under SLURM, in Kubernetes."""
