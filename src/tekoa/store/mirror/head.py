"""The head of a run directory in an object store: which objects are its files.

The head is one object, `tekoa.head`. It lists every file of the directory with the objects that
hold its bytes. All other objects are written under new names and never changed, so a put of the
head changes the whole directory at once. It is one line of JSON, followed by a line with the
CRC-32 of the first.

The fence counts the writers of the directory: a new writer first puts the head with the next
number. A put depends on the version of the head that it replaces, so earlier writers then fail.
"""

import dataclasses
import json
import zlib
from typing import Any, NamedTuple

from tekoa.store import errors
from tekoa.store.commit import paths

NAME = "tekoa.head"
FOLDER = "files"
VERSION = 1


class Part(NamedTuple):
    """A piece of a file: the object that holds it, its size in bytes and its CRC-32."""

    name: str
    size: int
    crc: int


Files = dict[str, tuple[Part, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """What a run directory contains.

    Attributes:
        id: Identifies the contents; a new writer keeps it, a publication changes it.
        fence: Number of the writer.
        files: The parts of each file, in order, by its path in the directory.
    """

    id: str = ""
    fence: int = 0
    files: Files = dataclasses.field(default_factory=dict)

    @property
    def objects(self) -> set[str]:
        """The names of all objects that hold files."""
        return {part.name for parts in self.files.values() for part in parts}


def encode(head: Head) -> bytes:
    """Returns the bytes of a head."""
    fields = {"version": VERSION, **dataclasses.asdict(head)}
    body = json.dumps(fields).encode()
    return body + b"\n%08x\n" % zlib.crc32(body)


def parse(data: bytes, url: str) -> Head:
    """Returns the head with these bytes; `url` is for messages.

    Raises:
        errors.DamagedError: If it is damaged, or names files outside the directory.
        errors.NewerVersionError: If a later version of Tekoa wrote it.
    """
    body, _, tail = data.partition(b"\n")
    if tail != b"%08x\n" % zlib.crc32(body):
        raise errors.DamagedError(f"{url}: does not match its own checksum.")
    try:
        fields: dict[str, Any] = json.loads(body)
        version = fields["version"]
        if type(version) is int and version > VERSION:
            raise errors.NewerVersionError(
                f"{url}: has format version {version}, this Tekoa reads {VERSION}. Update Tekoa."
            )
        files = {
            str(path): tuple(Part(str(name), int(size), int(crc)) for name, size, crc in parts)
            for path, parts in fields["files"].items()
        }
        head = Head(id=str(fields["id"]), fence=int(fields["fence"]), files=files)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise errors.DamagedError(f"{url}: cannot be read: {error}.") from None
    for path in (*head.files, *head.objects):
        if not paths.is_safe_path(path):
            raise errors.UnsafeError(f"{url}: lists {path!r}, which is outside the directory.")
    return head


def step_of(path: str) -> str | None:
    """Returns the step directory that contains a file, or None.

    >>> step_of('save/checkpoint_7/d/x'), step_of('checkpoint_7.bad-1/x'), step_of('run.json')
    ('save/checkpoint_7', 'checkpoint_7.bad-1', None)
    """
    folders = path.split("/")[:-1]
    for at, folder in enumerate(folders):
        if paths.parse_step(folder.partition(".")[0]) is not None:
            return "/".join(folders[: at + 1])
    return None
