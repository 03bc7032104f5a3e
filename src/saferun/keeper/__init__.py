"""The small process beside the job: it owns the processes and carries the output."""
