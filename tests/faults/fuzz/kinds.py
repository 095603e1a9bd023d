"""The readers that the fuzz program knows: valid inputs, how to write them, how to read them."""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import pathlib
import shutil
import struct
import types
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
from changes import Sealed

from tekoa import data, store
from tekoa.data.readers import records as record_lib
from tekoa.data.readers import tfrecord as record_format
from tekoa.estimator.cli import flags, main
from tekoa.estimator.cli.exit_codes import ExitCode
from tekoa.estimator.report import events
from tekoa.estimator.run import evaluations
from tekoa.extensions import early_stop, metrics_file, run_record, tensorboard
from tekoa.store import errors, t5x
from tekoa.store.commit import lease, score
from tekoa.store.formats import step as step_lib
from tekoa.store.transfer import best

TINY = str(pathlib.Path(__file__).resolve().parents[2] / "estimator" / "tiny_model.py")
MAX_BATCHES = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A reader.

    Attributes:
        inputs: Valid inputs.
        write: Writes an input.
        read: Reads what was written.
        expected: The documented errors.
        words: Words that are worth inserting.
    """

    inputs: list[Any]
    write: Callable[[Any], Any]
    read: Callable[[], Any]
    expected: tuple[type[BaseException], ...] = ()
    words: tuple[str, ...] = ()


def data_target(inputs, path, encode=None, pattern=None, words=()):
    """A file of data, read completely."""

    def write(value):
        path.write_bytes(encode(value.content) if isinstance(value, Sealed) else value)

    if encode is not None:
        write(inputs[0])
        inputs = [*inputs, path.read_bytes()]

    def read():
        source = data.load(pattern or str(path))
        source.info, len(source), source[0], source[-1]
        batches = source.batches(2, epochs=1, remainder="keep", shuffle=True)
        for _, _ in zip(range(MAX_BATCHES), batches, strict=False):
            pass

    return Target(inputs=inputs, write=write, read=read, expected=(data.DataError,), words=words)


def npz(scratch):
    def encode(members):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                is_bytes = isinstance(content, bytes)
                with contextlib.suppress(ValueError, UnicodeError):
                    archive.writestr(name, content if is_bytes else repr(content).encode())
        return buffer.getvalue()

    members = {}
    for name, array in {"x": np.arange(12.0).reshape(6, 2), "y": np.arange(6)}.items():
        buffer = io.BytesIO()
        np.save(buffer, array)
        members[f"{name}.npy"] = buffer.getvalue()
    dtypes = ("'<f8'", "'|O'", "'<U9'", "'<M8[ns]'", "'<c16'", "[('a', '<f8')]", "'|V8'", "True")
    return data_target([Sealed(members)], scratch / "a.npz", encode, words=dtypes)


IMAGES = struct.pack(">HBB3I", 0, 8, 3, 5, 2, 2) + bytes(range(20))
LABELS = struct.pack(">HBBI", 0, 8, 1, 5) + bytes(range(5))


def idx(scratch):
    (scratch / "train-labels-idx1-ubyte").write_bytes(LABELS)
    path = scratch / "train-images-idx3-ubyte"
    return data_target([IMAGES], path, pattern=f"idx://{scratch}/split=train")


def idx_gz(scratch):
    (scratch / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(IMAGES))
    path, pattern = scratch / "train-labels-idx1-ubyte.gz", f"idx://{scratch}/split=train"
    return data_target([Sealed(LABELS)], path, gzip.compress, pattern)


def csv(scratch):
    rows = b'x,y,text\n1,2.5,a\n3,-4e3,"b, c"\n,NaN,\n2024-01-01,true,""\n'
    plain = b"a,b\n1,2\n3,4\n"
    return data_target([rows, plain], scratch / "a.csv", words=("x", "1", "2024-01-01", "true"))


def jsonl(scratch):
    rows = b'{"x": [1, 2.5], "y": "a", "z": null}\n{"x": [3, 4], "y": "b", "z": {"q": [1]}}\n'
    return data_target([rows, b'{"x": 1}\n{"x": 2}\n'], scratch / "a.jsonl")


def parquet(scratch):
    import pyarrow
    from pyarrow import parquet

    columns = {"x": [1.5, 2.5, None], "y": ["a", "b", "c"], "z": [[1, 2], [3, 4], [5, 6]]}
    inputs = []
    for compression in ("none", "snappy"):
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), buffer, compression=compression)
        inputs.append(buffer.getvalue())
    return data_target(inputs, scratch / "a.parquet")


def encode_records(contents):
    parts = [part if isinstance(part, bytes) else repr(part).encode() for part in contents]
    return b"".join(record_format.encode_record(part) for part in parts)


def example():
    """A serialized tf.train.Example."""
    message = record_lib._example_class()()
    message.features.feature["x"].float_list.value.extend([1.0, 2.0])
    message.features.feature["n"].int64_list.value.append(3)
    message.features.feature["t"].bytes_list.value.append(b"ab")
    return message.SerializeToString()


def tfrecord(scratch):
    inputs = [Sealed([example()] * 3), Sealed([b"raw", b"records"])]
    return data_target(inputs, scratch / "a.tfrecord", encode_records)


def array_record(scratch):
    from array_record.python.array_record_module import ArrayRecordWriter

    path = str(scratch / "valid")
    writer = ArrayRecordWriter(path, "group_size:1")
    for _ in range(3):
        writer.write(example())
    writer.close()
    return data_target([pathlib.Path(path).read_bytes()], scratch / "a.array_record")


def tensorboard_events(scratch):
    folder = scratch / "train"
    writer = tensorboard.ScalarWriter(folder)
    for step in (1, 2, 3):
        writer.add({"train/loss": 1.0 / step}, step)
    writer.close()
    (path,) = folder.glob("events*")
    content = path.read_bytes()
    parts, at = [], 0
    while at < len(content):
        (n,) = struct.unpack_from("<Q", content, at)
        parts.append(content[at + 12 : at + 12 + n])
        at += 16 + n

    def read():
        events.read_curves(folder, [])
        command("page", str(scratch), "--out=page.html")
        events.read_curves(folder)

    return Target(
        inputs=[Sealed(parts), content],
        write=lambda value: path.write_bytes(
            encode_records(value.content) if isinstance(value, Sealed) else value
        ),
        read=read,
        expected=(errors.StoreError,),
    )


def command(*arguments):
    """Runs the command in this process; fails if its code is not a documented one."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main.main(arguments)
    assert code in set(ExitCode) - {ExitCode.UNEXPECTED}, code
    assert "Traceback" not in output.getvalue(), output.getvalue()
    assert "\x1b" not in output.getvalue(), output.getvalue()


def json_bytes(value):
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def file_target(path, read, *, encode=json_bytes, inputs=(), words=()):
    """One file of a directory, which exists already."""
    content = path.read_bytes()
    if not inputs:
        inputs = [Sealed(json.loads(content)), content]

    def write(value):
        path.write_bytes(encode(value.content) if isinstance(value, Sealed) else value)

    return Target(
        inputs=list(inputs), write=write, read=read, expected=(errors.StoreError,), words=words
    )


def t5x_step(scratch):
    tree = {
        "target": {"w": np.arange(9.0), "b": np.ones((2, 3), np.float32)},
        "state": {"step": 3, "param_states": {"w": np.zeros(9)}},
    }
    step = t5x.write(scratch, 3, tree, axes={"target": {"w": ()}})
    (step / "tekoa.manifest").unlink()

    def read():
        outcomes = []
        for reader in (t5x.read, store.load):
            with contextlib.suppress(errors.StoreError):
                outcomes.append(reader(step))
        command("inspect", str(scratch))
        command("inspect", str(step))

    return step, read


def t5x_msgpack(scratch):
    step, read = t5x_step(scratch)
    content = (step / "checkpoint").read_bytes()
    tree = msgpack.unpackb(content, strict_map_key=False)

    def encode(value):
        try:
            return msgpack.packb(value, strict_types=True)
        except (ValueError, OverflowError, TypeError, UnicodeError):
            return b"\xc0"

    words = ("driver", "kvstore", "path", "zarr", "file", "target", "metadata", "../x", "/x")
    return file_target(
        step / "checkpoint", read, encode=encode, inputs=[Sealed(tree), content], words=words
    )


def t5x_zarray(scratch):
    step, read = t5x_step(scratch)
    return file_target(
        step / "target.w" / ".zarray",
        read,
        words=("<f4", "|O", "<f8", "gzip", "blosc", "F", "NaN", "Infinity", "/", "bfloat16"),
    )


def t5x_chunk(scratch):
    step, read = t5x_step(scratch)
    path = step / "target.w" / "0"
    packed = path.read_bytes()
    inputs = [Sealed(gzip.decompress(packed)), packed]
    return file_target(path, read, encode=gzip.compress, inputs=inputs)


def native_step(scratch):
    with store.Store(scratch) as writer:
        tree = {"a": np.arange(6.0), "b": {"c": np.ones((2, 2), np.int8)}, "n": 3, "k": True}
        writer.save(1, {"model_params": tree, "x": 2}, meta={"x": 1}, metrics={"loss": 0.5})
    step = scratch / "checkpoint_1"

    def read():
        for verify in ("none", "full"):
            with contextlib.suppress(errors.StoreError):
                step_lib.open_step(step, verify=verify)
        command("inspect", str(scratch))
        command("inspect", str(step))
        command("page", str(scratch), "--out=page.html")
        store.load(step)

    return step, read


def manifest(scratch):
    step, read = native_step(scratch)
    path = step / "tekoa.manifest"
    content = path.read_bytes()

    def encode(body):
        text = json_bytes(body)
        return text + b"\n%08x\n" % zlib.crc32(text)

    body = content.splitlines()[0]
    inputs = [Sealed(json.loads(body)), Sealed(body), content]
    return file_target(path, read, encode=encode, inputs=inputs, words=("tekoa", "t5x", "native"))


def index(scratch):
    """The index, with a manifest that agrees."""
    step, read = native_step(scratch)
    path = step / "tekoa.json"
    manifest_path = step / "tekoa.manifest"
    body = json.loads(manifest_path.read_bytes().splitlines()[0])
    content = path.read_bytes()

    def write(value):
        text = json_bytes(value.content)
        path.write_bytes(text)
        body["files"]["tekoa.json"] = [len(text), zlib.crc32(text)]
        sealed = json.dumps(body).encode()
        manifest_path.write_bytes(sealed + b"\n%08x\n" % zlib.crc32(sealed))

    words = ("array", "key", "python", "float32", "bfloat16", "object", "int4", "threefry2x32")
    return Target(
        inputs=[Sealed(json.loads(content)), Sealed(content)],
        write=write,
        read=read,
        expected=(errors.StoreError,),
        words=words,
    )


def run_json(scratch):
    run = scratch / "run"
    arguments = [f"--model_dir={run}", "--train_pattern=train", "--max_train_steps=1"]
    command("train", TINY, *arguments)
    path = run / "run.json"
    count = itertools.count()

    def read():
        command("inspect", str(run))
        command("page", str(run), "--out=page.html")
        if next(count) % 100 == 99:  # These compile.
            command("eval", TINY, f"--model_dir={run}", "--eval_pattern=eval", "--dry_run")
            command("train", TINY, *arguments, "--dry_run")
        facts = run_record.read(path)
        run_record.changes(facts, {"settings": {"a": 1}, "flags": {"seed": 1}, "versions": {}})

    return file_target(path, read)


def train_end(scratch):
    target = run_json(scratch)
    run = scratch / "run"

    def read():
        command("page", str(run), "--out=page.html")
        waiting = ["--eval_pattern=eval", "--check_ckpt_every_secs=0", "--max_train_steps=1"]
        command("eval_wait", TINY, f"--model_dir={run}", *waiting)

    del target
    return file_target(run / "train_end.json", read)


def lease_file(scratch):
    clock = types.SimpleNamespace(**{**vars(lease.time), "sleep": lambda _: None})
    lease.time, lease.STALE_SECONDS = clock, 0.0
    path = scratch / lease.NAME
    path.write_text(json.dumps({**lease.identity(1), "token": "ab" * 16, "count": 3}))

    def read():
        with contextlib.suppress(errors.StoreError), lease.held(scratch):
            pass
        assert scratch.resolve() not in lease._held

    return file_target(path, read)


def score_file(scratch):
    folder = scratch / "high_x"
    folder.mkdir()
    (folder / "score").write_text("0.5")
    with store.Store(scratch) as writer:
        writer.save(1, {"model_params": {"a": np.ones(2)}})

    def read():
        command("inspect", str(scratch))
        score.BestScore(folder / "score", mode="max")

    words = ("nan", "inf", "1_0", "0x10", "1e5", "-0")
    return file_target(folder / "score", read, inputs=[b"0.5", b"-1e-05\n"], words=words)


def best_scores(scratch):
    """The scores of best copies, with the commit of each."""
    folder = scratch / "high_x"
    with store.Store(folder) as writer:
        writer.save(1, {"model_params": {"a": np.ones(2)}})
    digest = store.commit_id(folder / "checkpoint_1").digest
    path = folder / "scores.json"
    path.write_text(json.dumps([{"step": 1, "commit": digest, "value": 0.5}]))
    return file_target(path, lambda: best.BestCopies(folder, mode="max", keep=1).scores)


def early_stop_values(scratch):
    path = scratch / "early_stop.json"
    path.write_text(json.dumps({"1": 0.5, "2": 0.25, "3": float("nan")}))

    def read():
        early_stop.EarlyStopping("loss", patience=2, path=path).resume(2)

    return file_target(path, read)


def metrics_lines(scratch):
    path = scratch / "metrics.jsonl"
    rows = [{"step": n, "seconds": 0.5, "train/loss": 1 / n} for n in (1, 2, 3)]
    content = b"".join(json_bytes(row) + b"\n" for row in rows)
    path.write_bytes(content)

    def encode(rows):
        return b"".join(json_bytes(row) + b"\n" for row in rows)

    def read():
        writer = metrics_file.MetricsFile(path)
        writer.discard_after(2)
        writer.close()

    return file_target(path, read, encode=encode, inputs=[Sealed(rows), content])


def evaluation_notes(scratch):
    fields = {"step": 3, "metrics": {"loss": 0.5}, "wall_time": 1.5}
    commit = {"digest": "ab" * 32, "start": "cd" * 16, "parent": "ef" * 32}
    path = scratch / "evaluations"
    names = [f.name for f in dataclasses.fields(evaluations.CommitId)]
    line = {**fields, "commit": {k: v for k, v in commit.items() if k in names}}
    content = "".join(json.dumps({**line, "step": n}) + "\n" for n in (1, 2, 3)).encode()
    path.write_bytes(content)

    def read():
        notes = evaluations.Evaluations(path)
        notes.append(evaluations.Evaluation.from_json(json.dumps(line)))

    def encode(lines):
        return b"".join(json_bytes(line) + b"\n" for line in lines)

    lines = [json.loads(line) for line in content.splitlines()]
    return file_target(path, read, encode=encode, inputs=[Sealed(lines), content])


COMMANDS = [
    ["train", TINY, "--dry_run", "--model_dir=new", "--train_pattern=train"],
    ["eval", TINY, "--model_dir=run", "--eval_pattern=eval"],
    ["predict", TINY, "--model_dir=run", "--pred_pattern=p", "--pred_output=out.txt"],
    ["scales", TINY, "--train_pattern=train"],
    ["plan", TINY, "--train_pattern=train", "--device_memory=16GB"],
    ["inspect", "run"],
    ["page", "run", "--out=page.html"],
    ["convert", "run", "copy", "--to=t5x"],
    ["models"],
    ["launch", "--processes=2", "true"],
]
VALUES = ("", "0", "-1", "1", "2", "x", "1e9", "nan", "9" * 30, "data=2,model=4", "a=b;c", "2:3")
VALUES += (
    "loss:3:max",
    ".*=freeze",
    "(a+)+$=1",
    "auto",
    "off",
    "accuracy",
    "adam",
    "sphere",
    "lora",
)


def flag_list(scratch):
    """The arguments of the command: parsed, and run if that is quick and stays in the directory."""
    command("train", TINY, "--model_dir=run", "--max_train_steps=3", "--train_pattern=train")
    arguments: list[str] = []
    count = itertools.count(1)
    slow = {"coordinator_address", "num_processes", "process_id", "profiler_port", "compile_cache"}
    slow |= {"profile_steps", "compat", "host_timeout_secs", "module_config"}

    def is_quick():
        if arguments[:1] == ["launch"]:
            return False
        _, config = flags.parse(arguments)
        texts = [text for a in arguments[2:] for text in (a, a.partition("=")[2])]
        name = next(iter(arguments), "")
        return (
            not any(text.startswith(("/", "~")) or ".." in text for text in texts)
            and not slow & set(config.set_flags)
            and name in {c[0] for c in COMMANDS}
            # Most commands that run a model compile it.
            and (name in ("inspect", "page", "convert", "models") or next(count) % 50 == 0)
            and (name != "train" or config.dry_run)
            and max(config.train_batch_size, config.eval_batch_size, config.accumulate) < 10_000
        )

    def write(value):
        arguments[:] = [str(word) for word in value] if isinstance(value, list) else [str(value)]
        (scratch / "arguments.txt").write_text(repr(arguments))

    def read():
        if is_quick():
            shutil.rmtree("copy", ignore_errors=True)
            command(*arguments)
        elif arguments[:1] != ["launch"]:
            main.choose_command(flags.parse(arguments)[1])

    names = [f"--{name}" for name in flags.FLAG_NAMES]
    words = (*names, *(f"{n}={v}" for n in names for v in VALUES), "--module_config.n_classes=3")
    expected = (flags.UsageError, errors.StoreError)
    return Target(inputs=COMMANDS, write=write, read=read, expected=expected, words=words)


KINDS = {
    "npz": npz,
    "idx": idx,
    "idx_gz": idx_gz,
    "csv": csv,
    "jsonl": jsonl,
    "parquet": parquet,
    "tfrecord": tfrecord,
    "array_record": array_record,
    "events": tensorboard_events,
    "t5x_msgpack": t5x_msgpack,
    "t5x_zarray": t5x_zarray,
    "t5x_chunk": t5x_chunk,
    "manifest": manifest,
    "index": index,
    "run_json": run_json,
    "train_end": train_end,
    "lease": lease_file,
    "score": score_file,
    "best_scores": best_scores,
    "early_stop": early_stop_values,
    "metrics": metrics_lines,
    "evaluations": evaluation_notes,
    "flags": flag_list,
}
