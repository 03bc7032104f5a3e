"""Test the GPUs before a job."""
