"""The small process beside the job, which owns the job's processes and copies its output."""
