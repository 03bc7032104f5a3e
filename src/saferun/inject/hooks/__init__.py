"""The hooks: what saferun changes inside a job's processes, and what these hooks share."""
