"""`python -m tekoa.compat.jestimator FILE ...` runs a program written for JEstimator."""

import runpy
import sys

from tekoa.compat import jestimator

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Usage: python -m tekoa.compat.jestimator FILE [ARGUMENTS]")
    jestimator.install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
