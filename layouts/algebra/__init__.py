"""CuTe's layout algebra in plain Python."""
