"""The changes for the next attempt: mitigations, and the checkpoint to resume from."""
