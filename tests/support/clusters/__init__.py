"""Real clusters and stand-ins for those that cannot run here: Slurm, Ray, Kubernetes' API, pods as processes."""
