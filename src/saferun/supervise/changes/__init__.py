"""What the next attempt does differently: mitigations, and where it goes on."""
