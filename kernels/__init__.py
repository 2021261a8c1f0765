"""Device code in CuTe DSL, and how a variant of it is compiled."""
