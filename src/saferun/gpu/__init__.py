"""Lock GPUs, test them before a job, and recover them."""
