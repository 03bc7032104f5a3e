"""Warm starts: a process imports what the job will import, and becomes the job."""
