"""Watch a running job: hangs, stacks, slow ranks, output, first steps."""
