"""Tracker: passes the points of a run to Weights & Biases, MLflow, a CSV file or one's own service.

A tracker sends what is committed: the line of a step in `metrics.jsonl` goes out once the step's
checkpoint is on disk. A run that is killed therefore never resumes before a step that was sent. At
every start the tracker asks its service for the last step that it has, and sends the lines from
there on, so that each point is there once, whatever was lost in between.

If training returns to an earlier step, because the user rewinds it or a checkpoint is damaged, the
service's run is of another history: a new one begins, with the lines so far.

All of this happens in a background thread; see `outbox.py`. Texts are in `texts.jsonl` and are sent
in the same way. Images and histograms are in no file: they are sent at most once.
"""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tekoa import hosts
from tekoa.core import files
from tekoa.core.messages import did_you_mean
from tekoa.extensions import metrics_file, outbox
from tekoa.extensions.trackers import service as services
from tekoa.extensions.trackers.service import RunFacts, Service
from tekoa.loop.checkpoint import Checkpoint, as_summary
from tekoa.loop.media import Media, Text
from tekoa.store.commit import durable
from tekoa.store.read import json_lines

_log = logging.getLogger("tekoa")
_MAX_BYTES = 2**16
# Services start in seconds, and upload. Training and saving have ended by then.
CLOSE_SECONDS = 60.0
NAMES = ("wandb", "mlflow", "csv")


class Tracker:
    """Passes the points of every checkpoint to a tracking service; a stage for `serial`.

    A service that fails or is slow does not slow down training: there is one warning, and its
    points are sent later, at the next start if need be.

    Args:
        service: "wandb", "mlflow", "csv", or an object with the methods of `Service`.
        directory: Directory of the run's checkpoints and `metrics.jsonl`. Points are sent once
            their checkpoint is committed there. None if nothing is saved: they are sent at once.
        project: The project in Weights & Biases, the experiment in MLflow.
        config: Hyper-parameters, in addition to what is in `run.json`.
        **options: Further arguments of `wandb.init`; `tracking_uri` of MLflow; `path` of the CSV
            file.

    Raises:
        ValueError: If there is no service of this name.
        tekoa._extras.MissingPackageError: If the package of the service is not installed.
    """

    def __init__(
        self,
        service: str | Service,
        directory: str | os.PathLike[str] | None = None,
        *,
        project: str | None = None,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        self._directory = None if directory is None else files.local_path(directory)
        if isinstance(service, str):
            self._name, self._service = service, _service(service, self._directory, options)
        else:
            self._name, self._service = type(service).__name__, service
        self._project, self._config = project or "tekoa", dict(config or {})
        self._is_writer = hosts.current().is_writer
        self._outbox: outbox.Outbox | None = None

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Passes on the points of one checkpoint, in process 0 only."""
        if self._is_writer:
            if self._outbox is None:
                step = checkpoint.step - max(1, checkpoint.n_completed_steps)
                self._outbox = self._open(step)
            row, media = metrics_file.row_of(checkpoint), as_summary(checkpoint).media
            self._outbox.put([Points(row, media)])
        return checkpoint

    def _open(self, step: int) -> outbox.Outbox:
        sink = _ServiceSink(self._service, self._name, self._directory, self._facts, step)
        return outbox.Outbox(sink, name=f"Tracker {self._name}", held_for=self._directory)

    def _facts(self) -> RunFacts:
        directory = self._directory
        name = "run" if directory is None else directory.resolve().name
        config = services.config_of(directory, self._config)
        return RunFacts(name=name, project=self._project, config=config, directory=directory)

    def send_missing(self, step: int) -> None:
        """Sends the points up to a step that earlier starts could not send.

        For a run that has nothing to do: one that continues sends them with its next checkpoint.
        """
        if not self._is_writer or self._directory is None or self._outbox is not None:
            return
        rows = json_lines.read_rows(self._directory / metrics_file.FILE_NAME)
        last = max((row["step"] for row in rows if row["step"] <= step), default=-1)
        if last > _read_record(_record_path(self._directory, self._name)).get("sent", -1):
            self._outbox = self._open(last)
            # The sink sends the earlier points before a first one, which here is not new.
            self._outbox.put([Points({"step": last})])

    def close(self) -> None:
        """Sends the remaining points and ends the service's run."""
        if self._outbox is not None:
            self._outbox.close(CLOSE_SECONDS)
            self._outbox = None


@dataclasses.dataclass(frozen=True)
class Points:
    """The points of one step: a line of `metrics.jsonl`, and media by name."""

    row: Mapping[str, Any]
    media: Mapping[str, Media] = dataclasses.field(default_factory=dict)


def _service(name: str, directory: pathlib.Path | None, options: Mapping[str, Any]) -> Service:
    """Creates a service; only its own package is imported."""
    if name == "csv":
        from tekoa.extensions.trackers.csv_file import FILE_NAME, CSVService

        if directory is None and "path" not in options:
            raise ValueError("Tracker('csv') needs a directory, or path= for its file.")
        return CSVService(**{"path": pathlib.Path(directory or "", FILE_NAME), **options})
    if name == "wandb":
        from tekoa.extensions.trackers.wandb_service import WandbService

        return WandbService(**options)
    if name == "mlflow":
        from tekoa.extensions.trackers.mlflow_service import MLflowService

        return MLflowService(**options)
    raise ValueError(
        f"There is no tracker {name!r}.{did_you_mean(name, NAMES)} Use {', '.join(NAMES)}."
    )


class _ServiceSink:
    """A service as a sink of an `Outbox`; the first write opens its run."""

    def __init__(
        self,
        service: Service,
        name: str,
        directory: pathlib.Path | None,
        facts: Callable[[], RunFacts],
        step: int,
    ):
        self._service, self._directory, self._facts, self._step = service, directory, facts, step
        self._path = None if directory is None else _record_path(directory, name)
        self._is_open = False
        self._id, self._last = "", -1

    def write(self, records: Sequence[Points]) -> None:
        if not self._is_open:
            self._open()
            self._is_open = True
        for points in records:
            self._log(points)

    def _open(self) -> None:
        facts = dataclasses.replace(self._facts(), claim=self._write)
        run_id = None if self._path is None else _read_record(self._path).get("id")
        self._id, self._last = self._service.open(run_id, facts)
        if self._last > self._step:
            _log.warning(
                "The tracker has points up to step %d, and training resumed from step %d: a new "
                "run is tracked from here on, with the points so far.",
                self._last,
                self._step,
            )
            self._service.close()
            self._id, self._last = self._service.open(None, facts)
        if self._id != run_id:
            self._write(self._id)
        for points in self._history():
            self._log(points)

    def _history(self) -> Iterator[Points]:
        """Yields the points of earlier starts, up to the step where this one began."""
        if self._directory is None:
            return
        texts = json_lines.read_texts(self._directory)
        for row in json_lines.read_rows(self._directory / metrics_file.FILE_NAME):
            if row["step"] <= self._step:
                media = {k: Text(x) for k, x in texts.get(row["step"], {}).items()}
                yield Points(row, media)

    def _log(self, points: Points) -> None:
        # An attempt that failed in the middle is repeated.
        if points.row["step"] > self._last:
            self._service.log(points.row, points.media)
            self._last = points.row["step"]

    def _write(self, run_id: str, **facts: int) -> None:
        if self._path is not None and run_id:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(self._path, json.dumps({"id": run_id, **facts}).encode())

    def sync(self) -> None:
        """Does nothing: the next start sends again what the service has lost."""

    def close(self) -> None:
        if self._is_open:
            self._service.close()
            self._is_open = False
            self._write(self._id, sent=self._last)


def _record_path(directory: pathlib.Path, name: str) -> pathlib.Path:
    return directory / f"tracker_{name}.json"


def _read_record(path: pathlib.Path) -> dict[str, Any]:
    """Returns the id of the service's run, and the last step it had when it was closed."""
    try:
        record = files.read_json(path, max_bytes=_MAX_BYTES)
        return {"id": str(record["id"]), "sent": int(record.get("sent", -1))}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        _log.warning("%s is damaged: a new run is tracked.", path)
    return {}
