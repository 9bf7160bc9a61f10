"""`python -m octavo` is `octavo`."""

import sys

from octavo.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
