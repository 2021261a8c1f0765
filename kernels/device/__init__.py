"""The vocabulary of device code: memory, synchronisation, work and arithmetic."""
