"""MLflow: the points of a run in one MLflow run, on a server, in a database or in files."""

import collections
import json
import logging
import math
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from tekoa import _extras
from tekoa.core import messages
from tekoa.extensions.trackers.service import RunFacts, flatten, numbers
from tekoa.loop.media import Histogram, Media, Text, png

# MLflow's own limits.
_MAX_METRICS, _MAX_PARAMS, _MAX_CHARACTERS = 1000, 100, 500
_NOT_ALLOWED = re.compile(r"[^\w\-./ :]")
# A request of one point takes as long as one of five, and holds up training as much.
_SECONDS_BETWEEN_REQUESTS = 5.0


class MLflowService:
    """Logs to MLflow, through its client.

    Args:
        tracking_uri: Where to, such as "http://localhost:5000" or "sqlite:///mlflow.db"; by default
            what MLFLOW_TRACKING_URI says, or MLflow's own default.
    """

    def __init__(self, tracking_uri: str | None = None):
        mlflow = _extras.require("mlflow", extra="mlflow", what="The tracker 'mlflow'")
        self._entities = _extras.require(
            "mlflow.entities", extra="mlflow", what="The tracker 'mlflow'"
        )
        # Lines about new tables would tear the progress bar.
        messages.quiet_log("mlflow.store.db", logging.WARNING)
        # And those about the run's address are on standard output, which may have to be JSON.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        self._client: Any = mlflow.MlflowClient(tracking_uri)
        self._id = ""
        self._last: dict[str, int] = collections.defaultdict(lambda: -1)
        self._pending: dict[int, list[Any]] = {}
        self._sent_at = -math.inf

    def open(self, run_id: str | None, facts: RunFacts) -> tuple[str, int]:
        """Opens the MLflow run of an id, or a new one."""
        self._last.clear()
        self._pending.clear()
        if run_id is None:
            self._id = self._create(facts)
            facts.claim(self._id)
            self._log_config(facts)
            return self._id, -1
        self._id = run_id
        run = self._client.get_run(run_id)
        self._client.update_run(run_id, status="RUNNING")
        if not run.data.params:  # The program was killed before.
            self._log_config(facts)
        for name in run.data.metrics:
            steps = [metric.step for metric in self._client.get_metric_history(run_id, name)]
            self._last[name] = max(steps, default=-1)
        # Logged last of each step: with it, the step is complete.
        return run_id, self._last["seconds"]

    def _create(self, facts: RunFacts) -> str:
        experiment = self._client.get_experiment_by_name(facts.project)
        experiment_id = (
            self._client.create_experiment(facts.project)
            if experiment is None
            else experiment.experiment_id
        )
        tags = {"tekoa.directory": str(facts.directory or "")}
        return self._client.create_run(experiment_id, run_name=facts.name, tags=tags).info.run_id

    def _log_config(self, facts: RunFacts) -> None:
        config = json.loads(json.dumps(facts.config, default=str))
        params = [
            self._entities.Param(_name(name), str(value)[:_MAX_CHARACTERS])
            for name, value in flatten(config).items()
        ]
        for i in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[i : i + _MAX_PARAMS])
        self._client.log_text(self._id, json.dumps(config, indent=1), "config.json")

    def log(self, row: Mapping[str, Any], media: Mapping[str, Media]) -> None:
        """Logs the points of one step; several that follow soon are one request."""
        step, now = row["step"], int(time.time() * 1000)
        values = numbers(row)
        values["seconds"] = values.pop("seconds", 0.0)
        self._pending[step] = [
            self._entities.Metric(_name(name), value, now, step) for name, value in values.items()
        ]
        for name, value in media.items():
            self._log_media(f"{_name(name)}/{step:08d}", value)
        if time.monotonic() - self._sent_at >= _SECONDS_BETWEEN_REQUESTS:
            self._send()

    def _send(self) -> None:
        """Sends what is pending, but for the points that a killed program has sent."""
        metrics = [
            metric
            for metrics in self._pending.values()
            for metric in metrics
            if metric.step > self._last[metric.key]
        ]
        for i in range(0, len(metrics), _MAX_METRICS):
            batch = metrics[i : i + _MAX_METRICS]
            self._client.log_batch(self._id, metrics=batch)
            self._last |= {metric.key: metric.step for metric in batch}
        self._pending.clear()
        self._sent_at = time.monotonic()

    def _log_media(self, path: str, media: Media) -> None:
        """Stores texts and images as artifacts; MLflow has no histograms."""
        if isinstance(media, Text):
            self._client.log_text(self._id, media.value, f"{path}.txt")
        elif not isinstance(media, Histogram):
            with tempfile.TemporaryDirectory() as directory:
                folder, _, name = path.rpartition("/")
                file = pathlib.Path(directory, f"{name}.png")
                file.write_bytes(png(media))
                self._client.log_artifact(self._id, str(file), folder)

    def close(self) -> None:
        """Sends the last points and ends the MLflow run."""
        if self._id:
            self._send()
            self._client.set_terminated(self._id)
            self._id = ""


def _name(name: str) -> str:
    """Returns a name with the characters that MLflow allows."""
    return _NOT_ALLOWED.sub("_", name)
