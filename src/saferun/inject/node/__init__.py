"""What torchrun's agent does where a run has several nodes: meet, watch the others, come back."""
