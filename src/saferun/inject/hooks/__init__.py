"""The hooks: one file for each part of torch that saferun changes inside a job."""
