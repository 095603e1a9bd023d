"""`python -m tekoa` is the command `tekoa`."""

import sys

from tekoa.estimator.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
