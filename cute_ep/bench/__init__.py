"""How times are taken and what they are compared with."""
