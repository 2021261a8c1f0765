"""`python -m cute_ep`: the `cute-ep` program."""

from cute_ep.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
