"""Jobs on Slurm: one sbatch script per stage, chained by `afterok`, with one node agent per node."""
