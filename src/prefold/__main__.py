"""`python -m prefold` is `prefold`."""

import sys


def run() -> int:
    """The command line. Ctrl-C is no traceback, not even while it is imported."""
    try:
        from prefold.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
