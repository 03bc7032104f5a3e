"""Check what each part of the machine must have."""
