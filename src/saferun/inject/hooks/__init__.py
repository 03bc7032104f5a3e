"""The hooks: saferun's changes inside a job's processes, and the code that hooks share."""
