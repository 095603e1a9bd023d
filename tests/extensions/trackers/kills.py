"""A run that is killed twice and completed, by command, with a tracker."""

import json
import signal

from support.processes import TINY_MODEL, Command


def killed_run(tmp_path, tracker, **env):
    """Trains 40 steps with SIGKILL in between; returns the directory and the rows of the run."""
    run = tmp_path / "run"
    words = [
        "train",
        TINY_MODEL,
        "--max_train_steps=40",
        f"--model_dir={run}",
        f"--track={tracker}",
    ]
    for step in (15, 30):
        command = Command(words, tmp_path / "log", **env)
        command.wait_until((run / f"checkpoint_{step}").exists)
        command.send(signal.SIGKILL)
        command.wait()
    command = Command(words, tmp_path / "log", **env)
    code, _ = command.wait()
    assert code == 0, command.output()
    assert "Traceback" not in command.output()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return run, [json.loads(line) for line in lines]
