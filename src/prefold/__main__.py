"""`python -m prefold` is `prefold`."""

import sys

from prefold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
