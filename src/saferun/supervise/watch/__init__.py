"""What is watched while a job runs: hangs, stacks, slow ranks, output, first steps."""
