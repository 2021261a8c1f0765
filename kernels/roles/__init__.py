"""What a kernel's CTAs do, one role a file."""
