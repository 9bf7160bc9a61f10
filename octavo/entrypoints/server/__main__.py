"""`python -m octavo.entrypoints.server --model MODEL` is `octavo serve --model MODEL`."""

import sys

from octavo.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
