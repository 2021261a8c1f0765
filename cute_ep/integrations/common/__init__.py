"""What several adapters use. Imports none of the libraries that are adapted."""
