"""Warm starts: a process that has imported what the job will import, and becomes the job."""
