"""Launch shapes: how many CTAs do what, from built-in tables or from a file of `cute-ep tune`."""
