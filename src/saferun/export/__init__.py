"""The run as a bash or Slurm script."""
