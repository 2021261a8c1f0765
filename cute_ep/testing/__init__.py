"""Inputs, and the comparison of a communicator with the reference; also for users' machines (`cute-ep verify`)."""
