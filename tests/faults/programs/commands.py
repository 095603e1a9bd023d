"""Runs commands one after the other in this process. Prints code and output of each as JSON.

`commands.py '[["inspect", "run"], ["resume", "run"]]'`: "resume" is what a trainer does first, it
restores the newest valid step and quarantines newer damaged ones.
"""

import contextlib
import io
import json
import sys

import numpy as np

from tekoa.estimator.cli import main
from tekoa.store import errors
from tekoa.store.store import Store


def resume(directory):
    try:
        with Store(directory) as store:
            store.restore({"model_params": {"w": np.zeros(3)}})
    except errors.StoreError as error:
        print(error)
        return error.exit_code
    except PermissionError as error:
        print(error)
        return 2
    return 0


for words in json.loads(sys.argv[1]):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = resume(*words[1:]) if words[0] == "resume" else main.main(words)
    print(json.dumps({"code": code, "output": output.getvalue()}), flush=True)
