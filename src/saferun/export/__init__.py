"""Write the run as a bash or Slurm script."""
