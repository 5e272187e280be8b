"""`python -m opintercept`: the command line."""

from opintercept.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
