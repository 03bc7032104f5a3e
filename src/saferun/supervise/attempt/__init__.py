"""One attempt: its life, its end, and the evidence that it leaves."""
