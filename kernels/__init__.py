"""Device code in CuTe DSL and the list of ahead-of-time variants."""
