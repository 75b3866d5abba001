"""Damage to files: flipped bits, texts that break off, JSON that is not what it should be."""

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

Chance = random.Random
LONG_INTEGER, DEEP = "<a long integer>", "<many levels>"  # what `json` itself would not write
RAW = {LONG_INTEGER: "9" * 5000, DEEP: "[" * 100_000 + "]" * 100_000}
ODD: tuple[Any, ...] = (
    *(None, True, False, "", "text", "\ud800", "9" * 5000, [], {}, [[]], {"a": 1}, [None, 1, "x"], LONG_INTEGER, DEEP),
    *(0, 1, -1, 2, 7, 2**31, 2**63, 10**30, -(10**12), 0.5, -0.0, 1e-300, 1e39, 1e300, math.inf, -math.inf, math.nan),
)
NAMES = ("colour", "format", "sha256", "\u00e9", "__class__", "")


def damage_bytes(data: bytes, chance: Chance) -> bytes:
    """A file after something went wrong below it: on a disk, on its way, in an editor."""
    place = chance.randrange(len(data))
    kind = chance.choice(("flip", "flip", "flip", "cut", "zeros", "insert", "encoding", "empty", "twice"))
    if kind == "flip":
        return flip(data, chance, 0)
    if kind == "cut":
        return data[:place]
    if kind == "zeros":
        size = min(chance.choice((1, 16, 512)), len(data) - place)
        return data[:place] + bytes(size) + data[place + size :]
    if kind == "insert":
        return data[:place] + chance.randbytes(chance.choice((1, 8))) + data[place:]
    if kind == "encoding":
        text = data.decode("utf-8", errors="replace")
        return chance.choice((text.encode("utf-16"), b"\xef\xbb\xbf" + data, data[:place] + b"\xe9" + data[place:]))
    return b"" if kind == "empty" else data + data


def flip(data: bytes, chance: Chance, start: int) -> bytes:
    """A few bits the other way round, not before `start`."""
    result = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        result[chance.randrange(start, len(result))] ^= 1 << chance.randrange(8)
    return bytes(result)


def damage_json(text: str, chance: Chance) -> str:
    """A document of which one value is another, missing, or one too many."""
    document = json.loads(text)
    parents: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, (dict, list)):
            parents.append(value)
            for inner in value.values() if isinstance(value, dict) else value:
                collect(inner)

    collect(document)
    target = chance.choice(parents[: chance.choice((1, 4, len(parents)))])  # the first ones say what the others are
    keys = list(target) if isinstance(target, dict) else list(range(len(target)))
    kind = chance.choice(("value", "value", "value", "missing", "more", "number"))
    if kind == "more" or not keys:
        if isinstance(target, dict):
            target[chance.choice(NAMES)] = chance.choice(ODD)
        else:
            target.append(chance.choice([*target, *ODD]))
    else:
        key = chance.choice(keys)
        if kind == "missing":
            del target[key]
        elif kind == "number" and isinstance(target[key], (int, float)):
            target[key] = target[key] * chance.choice((-1, 2, 1.5, 1e6)) + chance.choice((0, 1))
        else:
            target[key] = chance.choice(ODD)
    result = json.dumps(document)
    for mark, raw in RAW.items():
        result = result.replace(json.dumps(mark), raw)
    return result


def damage_document(data: bytes, chance: Chance) -> bytes:
    """A JSON file with something wrong about it."""
    if chance.random() < 0.4:
        return damage_bytes(data, chance)
    return damage_json(data.decode(), chance).encode("utf-8", errors="surrogatepass")


def damage_tensors(data: bytes, chance: Chance) -> bytes:
    """A safetensors file with something wrong about its numbers, its header, or a document in its header."""
    size = struct.unpack("<Q", data[:8])[0]
    kind = chance.choice(("numbers", "numbers", "header", "document", "bytes"))
    if kind == "numbers" and len(data) > 8 + size:
        return flip(data, chance, 8 + size)
    if kind == "bytes":
        return damage_bytes(data, chance)
    header = json.loads(data[8 : 8 + size])
    texts = header.get("__metadata__", {})
    documents = [name for name, text in texts.items() if text.startswith("{")]
    if kind == "document" and documents:
        name = chance.choice(documents)
        texts[name] = damage_json(texts[name], chance)
        changed = json.dumps(header)
    else:
        changed = damage_json(json.dumps(header), chance)
    new = changed.encode("utf-8", errors="surrogatepass")
    return struct.pack("<Q", len(new)) + new + data[8 + size :]


def without_seal(data: bytes) -> bytes:
    """A document, or a safetensors file, without the checksum that would give damage away: as somebody edited it."""
    if data[:1] == b"{":
        return json.dumps({key: value for key, value in json.loads(data).items() if key != "sha256"}).encode()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"].pop("pmvit-sha256")
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + data[8 + size :]


def damage(name: str) -> Callable[[bytes, Chance], bytes]:
    """What damages a file of this name."""
    if name.endswith(".safetensors"):
        return damage_tensors
    return damage_document if name.endswith(".json") else damage_bytes
