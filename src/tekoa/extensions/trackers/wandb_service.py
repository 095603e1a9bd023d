"""Weights & Biases: the points of a run in one W&B run, online or offline.

A killed program loses what `wandb` has not written yet. The last step that W&B has is therefore
read back at every start: from its server, or from the files of an offline run.
"""

import html
import json
import logging
import os
import pathlib
import struct
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from tekoa import _extras
from tekoa.extensions.trackers.service import RunFacts, numbers
from tekoa.loop.media import Histogram, Media, Text

_log = logging.getLogger("tekoa")

# The layout of a W&B file: that of LevelDB's log, after a header.
_HEADER_BYTES, _BLOCK_BYTES = 7, 32768
_PART = struct.Struct("<IHB")
_FULL, _LAST = 1, 4
_FLUSH_SECONDS = 10.0


class WandbService:
    """Logs to Weights & Biases.

    Args:
        **options: Arguments of `wandb.init`, such as `entity`, `group`, `tags` or `mode`. The mode
            is that of WANDB_MODE by default; "offline" if there is no API key.
    """

    def __init__(self, **options: Any):
        self._wandb = _extras.require("wandb", extra="wandb", what="The tracker 'wandb'")
        self._options = options
        self._run: Any = None
        self._directory, self._is_offline, self._last = pathlib.Path(), False, -1

    def open(self, run_id: str | None, facts: RunFacts) -> tuple[str, int]:
        """Opens the W&B run of an id, or a new one."""
        wandb = self._wandb
        new_id = run_id or uuid.uuid4().hex[:12]
        self._directory = directory = (facts.directory or pathlib.Path()).resolve()
        # Its own output would tear the progress bar.
        settings = wandb.Settings(console="off", silent=True)
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", facts.project),
            "name": os.environ.get("WANDB_NAME", facts.name),
            "dir": str(directory),
            "settings": settings,
            **self._options,
        }
        options["mode"] = options.get("mode") or self._mode()
        last = -1 if run_id is None else _last_offline_step(directory, new_id)
        facts.claim(new_id)
        self._run = wandb.init(id=new_id, resume="allow", reinit="create_new", **options)
        config = json.loads(json.dumps(facts.config, default=str))
        self._run.config.update(config, allow_val_change=True)
        self._is_offline, self._last = options["mode"] == "offline", -1
        if not self._is_offline:
            last = max(last, self._run.step - 1)
            _log.info("Weights & Biases: %s", self._run.url)
        return new_id, last

    def _mode(self) -> str:
        mode = os.environ.get("WANDB_MODE")
        if mode:
            return mode
        # Without a key `wandb` would ask for one at the terminal.
        if self._wandb.login(prompt=False):
            return "online"
        _log.warning(
            "Weights & Biases has no API key: the run is tracked offline. Upload it with `wandb "
            "sync`, or log in with `wandb login`."
        )
        return "offline"

    def log(self, row: Mapping[str, Any], media: Mapping[str, Media]) -> None:
        """Logs the points of one step."""
        objects = {name: self._object(value) for name, value in media.items()}
        self._run.log({**numbers(row), **objects}, step=row["step"], commit=True)
        self._last = row["step"]

    def _object(self, media: Media) -> Any:
        if isinstance(media, Text):
            return self._wandb.Html(f"<pre>{html.escape(media.value)}</pre>")
        if isinstance(media, Histogram):
            return self._wandb.Histogram(np_histogram=(list(media.counts), list(media.edges)))
        return self._wandb.Image(media.bytes.squeeze())

    def close(self) -> None:
        """Ends the W&B run."""
        if self._run is not None:
            run_id = self._run.id
            self._run.finish()
            self._run = None
            if self._is_offline:
                self._wait_for_file(run_id)

    def _wait_for_file(self, run_id: str) -> None:
        """Waits until the points of an offline run are in its file: its writer ends later."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while _last_offline_step(self._directory, run_id) < self._last:
            if time.monotonic() > deadline:
                raise TimeoutError(f"wandb has not written all points of run {run_id} yet")
            time.sleep(0.02)


def _last_offline_step(directory: pathlib.Path, run_id: str) -> int:
    """Returns the last step in the files of an offline run, or -1."""
    paths = directory.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    return max((step for path in paths for step, _ in offline_points(path)), default=-1)


def offline_points(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the step and the values of all points in the file of an offline run."""
    messages: Any = _extras.require(
        "wandb.proto.wandb_internal_pb2", extra="wandb", what="The tracker 'wandb'"
    )
    for data in _records(path.read_bytes()):
        record = messages.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            yield int(values["_step"]), values


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the complete records of a file; a kill may have cut off the last one."""
    position, record = _HEADER_BYTES, b""
    while position + _PART.size <= len(data):
        n_left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if n_left < _PART.size:
            position += n_left
            continue
        _, n_bytes, kind = _PART.unpack_from(data, position)
        position += _PART.size
        if position + n_bytes > len(data):
            return
        record += data[position : position + n_bytes]
        position += n_bytes
        if kind in (_FULL, _LAST):
            yield record
            record = b""
