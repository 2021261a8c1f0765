"""Adapters to other libraries. Each imports its library when it is imported itself, and nothing else imports it."""
