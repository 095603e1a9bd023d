"""Random changes of bytes, text and trees, for the fuzz program."""

import dataclasses
import random
from typing import Any

import msgpack

JUNK = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 2**70, -(2**63), 10**400),
    *(
        1.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "..",
        "../x",
        "/x",
        "a\0b",
        "\ud800",
        "9" * 5000,
    ),
    *([], [[]], {}, {"a": 1}, {"": {}}, [2**40, 2**40], [-1], [0], [1] * 100),
]
BYTES = [b"", b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0" * 8, b"\xff" * 8, b"\n", b"\r", b'"']
BYTES += [
    b",",
    b"{",
    b"[" * 2000,
    b"}",
    b"1e999",
    b"NaN",
    b"-",
    b"9" * 5000,
    b"\\u0000",
    b"\xed\xa0\x80",
]


@dataclasses.dataclass(frozen=True)
class Sealed:
    """Content that gets valid checksums or compression after it was changed."""

    content: Any


def change(value: Any, rng: random.Random, words=()) -> Any:
    """Returns a value that differs in one to four places."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = change_once(value, rng, words)
    return value


def change_once(value: Any, rng: random.Random, words=()) -> Any:
    match value:
        case Sealed():
            return Sealed(change_once(value.content, rng, words))
        case bytes():
            return change_bytes(value, rng, [*BYTES, *(word.encode() for word in words)])
        case msgpack.ExtType():
            return msgpack.ExtType(value.code, change_once(value.data, rng, words))
        case str() if rng.random() < 0.5:
            return change_bytes(value.encode(errors="replace"), rng, BYTES).decode(errors="replace")
        case list() | tuple() if value and rng.random() < 0.9:
            return change_list(list(value), rng, words)
        case dict() if value and rng.random() < 0.9:
            return change_dict(dict(value), rng, words)
        case int() if rng.random() < 0.5:
            return value + rng.choice((-1, 1, 2 ** rng.randrange(70)))
    if isinstance(value, str) and words and rng.random() < 0.6:
        return rng.choice(words)
    return rng.choice(JUNK)


def change_list(items: list, rng: random.Random, words) -> list:
    at = rng.randrange(len(items))
    match rng.randrange(8):
        case 0:
            del items[at]
        case 1:
            items.insert(rng.randrange(len(items) + 1), items[at])
        case 2:
            other = rng.randrange(len(items))
            items[at], items[other] = items[other], items[at]
        case 3 if words and isinstance(items[at], str):
            items.insert(at, rng.choice(words))
        case _:
            items[at] = change_once(items[at], rng, words)
    return items


def change_dict(items: dict, rng: random.Random, words) -> dict:
    key = rng.choice(list(items))
    match rng.randrange(10):
        case 0:
            del items[key]
        case 1:
            items[str(rng.choice(JUNK))[:100]] = items[key]
        case 2:
            items[key] = items[rng.choice(list(items))]
        case _:
            items[key] = change_once(items[key], rng, words)
    return items


def change_bytes(data: bytes, rng: random.Random, tokens) -> bytes:
    at = rng.randrange(len(data) + 1)
    n = min(len(data) - at, int(2 ** rng.uniform(0, 8)))
    match rng.randrange(8):
        case 0 if n:  # One bit.
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + rng.randbytes(n) + data[at + n :]
        case 2:
            return data[:at] + data[at + n :]
        case 3:
            return data[:at] + rng.choice(tokens) + data[at:]
        case 4:
            token = rng.choice(tokens)
            return data[:at] + token + data[at + len(token) :]
        case 5:  # Repeats a part.
            return data[:at] + data[at : at + n] * rng.choice((2, 2, 2, 50)) + data[at + n :]
        case 6:
            return data[:at]
        case _:  # A number: little and big endian, small steps and edges.
            size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            number = int.from_bytes(data[at : at + size], order) + rng.choice((-1, 1, 255, 2**31))
            number = rng.choice((number, number, 0, 2 ** (8 * size) - 1, 2 ** (8 * size - 1)))
            return data[:at] + (number % 2 ** (8 * size)).to_bytes(size, order) + data[at + size :]
