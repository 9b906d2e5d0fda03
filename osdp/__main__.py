"""`python -m osdp`: the command line, where the `osdp` command is not on the path."""

from osdp.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
