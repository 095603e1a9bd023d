"""Tries to read each T5X checkpoint on the command line. Prints one JSON line per read."""

import json
import resource
import sys
import time

from tekoa import store
from tekoa.store import errors, t5x


def attempt(read, path):
    try:
        read(path)
    except errors.UnsafeError as error:
        return "unsafe", str(error)
    except errors.StoreError as error:
        return "damaged", str(error)
    except Exception as error:
        return "crashed", repr(error)
    return "read", ""


for path in sys.argv[1:]:
    for read in (t5x.read, store.load):
        started = time.monotonic()
        outcome, message = attempt(read, path)
        print(
            json.dumps(
                {
                    "path": path,
                    "outcome": outcome,
                    "message": message,
                    "seconds": round(time.monotonic() - started, 3),
                    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                }
            )
        )
