"""Locks on GPUs, their test before a job, and their recovery."""
