"""What callers give and get: configuration, batches, checks, errors, and the class that both backends implement."""
