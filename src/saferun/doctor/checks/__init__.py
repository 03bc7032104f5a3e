"""What each part of the machine must have."""
