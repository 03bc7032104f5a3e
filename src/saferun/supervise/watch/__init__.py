"""What is watched while a job runs: hangs, stacks, output, first steps."""
