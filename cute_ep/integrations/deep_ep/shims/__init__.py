"""A folder for `sys.path`, where other libraries' names find adapters; not to be imported itself."""
