"""The test of the GPUs before a job."""
