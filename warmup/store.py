"""The artifact store: compiled programs on disk, one folder per fingerprint.

Layout under the cache's root (``--warmup-cache``)::

    programs/<fingerprint>/fingerprint.json   the components of the fingerprint, for people and for a diff
    programs/<fingerprint>/manifest.json      what was resolved, the entries with checksums, the proof
    programs/<fingerprint>/arguments.json     the abstract arguments of each program, for the diff
    programs/<fingerprint>/<program>-<checksum>.bin
    xla/<platform>/                           JAX's persistent cache (manual mode, ``warmup/xla_cache.py``)
    weights/<key>/                            converted weights (``warmup/weights.py``)

An entry's file is named after its content, so several processes may fill one folder: none overwrites what another's
manifest refers to, and the manifest itself is merged under a lock and replaced atomically. A process that dies
half-way leaves files that no manifest names; `prune` removes them. A checksum covers the fingerprint, the program's name
and its arguments together with the bytes, so an entry that stands in another's place is found before it runs.

The store never fails a start. What it cannot read is a `Miss` with a reason, and is compiled again; what it cannot
write is one warning (``warmup/folder.py``). Trust: ``warmup/trust.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

from warmup import trust
from warmup.fingerprint import Fingerprint, Json
from warmup.folder import Folder, seal
from warmup.trust import Untrusted

logger = logging.getLogger(__name__)

FORMAT = 2  # of manifest and entries; another number is another world
_HEADER = 8  # bytes: length of the pickled trees that stand before the executable


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A serialized executable with the output tree that calling it needs.

    ``out_tree`` is the output's pytree with integers as leaves, so that a tree definition is made from it without
    tracing. The input tree needs no storing: it is that of the program's arguments.
    """

    payload: bytes | memoryview
    out_tree: object


class Entry(TypedDict):
    """A program in the manifest."""

    file: str
    checksum: str
    size: int
    arguments: str


class Proof(TypedDict):
    """That the entries passed the proof before ready."""

    mode: str
    seconds: float
    requests: int
    entries: str


class Manifest(TypedDict):
    """``manifest.json``; what is read has passed `check_manifest`."""

    format: int
    fingerprint: str
    resolved: dict[str, Json]
    entries: dict[str, Entry]
    proof: Proof | None


@dataclasses.dataclass(frozen=True)
class Miss:
    """Why an entry cannot be used. ``quiet``: nothing is wrong, it was never there."""

    reason: str
    quiet: bool = False


@dataclasses.dataclass(frozen=True)
class Pending:
    """An entry whose file is written, and which is not in the manifest yet: it has not run."""

    name: str
    file: str
    checksum: str
    size: int
    arguments: str


class ArtifactStore:
    """The folder of one fingerprint.

    ``root`` of `None` (``--warmup-cache off``) makes a store that holds nothing. The constructor checks, creates and
    reads; it logs a warning if the folder cannot be used.
    """

    def __init__(self, root: Path | None, fingerprint: Fingerprint):
        self.fingerprint = fingerprint
        self._lock = threading.Lock()
        self._manifest = _empty_manifest()
        self._folder = Folder.open(root, "programs", fingerprint.digest)
        if self._folder is not None:
            self._manifest = self._read_manifest(complain=True)
            self._describe("fingerprint.json", fingerprint.components)

    @property
    def root(self) -> Path | None:
        """The cache's root; `None` if there is no cache, or none that can be used."""
        return self._folder.root if self._folder else None

    @property
    def folder(self) -> Path | None:
        """The folder of this fingerprint, likewise."""
        return self._folder.path if self._folder else None

    @property
    def writable(self) -> bool:
        """Entries can be stored, as far as is known."""
        return self._folder is not None and self._folder.writable

    # Reading.

    @property
    def resolved(self) -> Mapping[str, Json]:
        """What an earlier start resolved (``kv_pages``); empty at the first."""
        return self._manifest["resolved"]

    @property
    def names(self) -> tuple[str, ...]:
        """The programs that the manifest lists."""
        return tuple(self._manifest["entries"])

    def files(self) -> dict[str, Path]:
        """The file of each entry."""
        if self._folder is None:
            return {}
        return {name: self._folder.path / entry["file"] for name, entry in self._manifest["entries"].items()}

    def load(self, name: str, arguments: str, lines: Callable[[], list[str]]) -> Artifact | Miss:
        """Reads and checks one entry. Thread-safe.

        ``arguments`` is the digest of the program's abstract arguments; ``lines`` describes them, for the message if
        they differ.
        """
        if self._folder is None:
            return Miss("no cache", quiet=True)
        entry = self._manifest["entries"].get(name)
        if entry is None:
            return Miss("not in the cache", quiet=True)
        if entry["arguments"] != arguments:
            return Miss(f"made for other arguments: {self._explain_arguments(name, lines())}")
        try:
            data = self._folder.read(entry["file"])
        except FileNotFoundError:
            return Miss(f"its file {entry['file']} is missing")
        except Untrusted as error:
            return Miss(str(error))
        except OSError as error:
            return Miss(f"its file {entry['file']} cannot be read: {error.strerror}")
        if len(data) != entry["size"]:
            return Miss(f"its file {entry['file']} has {len(data)} bytes instead of {entry['size']}")
        if self._checksum(name, arguments, data) != entry["checksum"]:
            return Miss(f"its file {entry['file']} has another checksum than what was stored for this program")
        return _unpack(data)

    # Writing.

    def put(self, name: str, artifact: Artifact, arguments: str) -> Pending | None:
        """Writes an entry's file; `commit` makes it valid once it has run. `None` if it could not be written."""
        data = _pack(artifact)
        checksum = self._checksum(name, arguments, data)
        file = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{checksum[:16]}.bin"
        if self._folder is None or not self._folder.write(file, data):
            return None
        return Pending(name, file, checksum, len(data), arguments)

    def commit(
        self,
        pending: Sequence[Pending],
        *,
        arguments: Mapping[str, list[str]] | None = None,
        groups: Mapping[str, list[str]] | None = None,
    ) -> None:
        """Enters programs that have run into the manifest. ``arguments`` and ``groups`` describe them, for a later
        diff."""
        if not pending:
            return
        with self._update() as manifest:
            for item in pending:
                entry = Entry(file=item.file, checksum=item.checksum, size=item.size, arguments=item.arguments)
                manifest["entries"][item.name] = entry
            manifest["proof"] = None  # these have not been through a proof
        if arguments is not None and groups is not None:
            self._describe("arguments.json", {"programs": dict(arguments), "groups": dict(groups)})

    def discard(self, name: str) -> None:
        """Takes an entry out of the manifest: it turned out to be unusable."""
        with self._update() as manifest:
            manifest["entries"].pop(name, None)
            manifest["proof"] = None

    def record_resolved(self, values: Mapping[str, Json]) -> None:
        """Stores what this start resolved, for every later one."""
        if dict(self.resolved) == dict(values):
            return
        with self._update() as manifest:
            manifest["resolved"] = dict(values)

    def record_proof(self, mode: str, seconds: float, requests: int) -> None:
        """Records that the programs of the manifest passed the proof before ready."""
        with self._update() as manifest:
            manifest["proof"] = {
                "mode": mode,
                "seconds": round(seconds, 3),
                "requests": requests,
                "entries": self._entries_digest(manifest),
            }

    @property
    def proven(self) -> bool:
        """The entries of the manifest, all of them and unchanged, have passed the proof."""
        proof = self._manifest["proof"]
        return proof is not None and proof["entries"] == self._entries_digest(self._manifest)

    # Explaining.

    def explain_miss(self) -> str:
        """One line on why nothing is stored for this fingerprint: what differs from the nearest older one."""
        nearest: list[str] | None = None
        for folder in self._siblings():
            try:
                components = json.loads(trust.read(folder / "fingerprint.json"))
                lines = self.fingerprint.diff(components)
            except (OSError, Untrusted, ValueError, AttributeError, RecursionError):
                continue  # a folder that cannot be read explains nothing
            if nearest is None or len(lines) < len(nearest):
                nearest = lines
        if nearest is None:
            return "no earlier start has stored programs here"
        return f"unlike the nearest stored configuration: {shorten(nearest)}"

    def _siblings(self) -> list[Path]:
        if self.folder is None:
            return []
        with contextlib.suppress(OSError):
            return [path for path in sorted(self.folder.parent.iterdir()) if path != self.folder]
        return []

    def _explain_arguments(self, name: str, lines: Sequence[str]) -> str:
        assert self._folder is not None
        try:
            stored = json.loads(self._folder.read("arguments.json"))
            old = [line for group in stored["programs"][name] for line in stored["groups"][group]]
        except (OSError, Untrusted, ValueError, KeyError, TypeError, RecursionError):
            return "their description is not stored"
        changed = [f"-{line}" for line in old if line not in lines] + [f"+{line}" for line in lines if line not in old]
        return shorten(changed) or "another order"

    # The manifest.

    def _read_manifest(self, *, complain: bool) -> Manifest:
        """The manifest, or an empty one. Whatever is wrong with it, everything is compiled again."""
        assert self._folder is not None
        try:
            manifest = check_manifest(json.loads(self._folder.read("manifest.json")))
            if manifest["fingerprint"] != self.fingerprint.digest:
                raise ValueError(f"it belongs to fingerprint {manifest['fingerprint']}")
            return manifest
        except FileNotFoundError:
            pass
        except (OSError, Untrusted, ValueError, RecursionError) as error:
            if complain:
                path = self._folder.path / "manifest.json"
                logger.warning("warmup cache: %s cannot be used, all programs are compiled again: %s", path, error)
        return _empty_manifest()

    @contextlib.contextmanager
    def _update(self) -> Iterator[Manifest]:
        """Reads, changes and replaces the manifest under a lock between threads and processes; where it cannot be written, changes
        what this process knows of it."""
        if self._folder is None:
            yield self._manifest
            return
        with self._lock, self._folder.locked():
            manifest = self._read_manifest(complain=False) if self.writable else self._manifest
            yield manifest
            manifest["fingerprint"] = self.fingerprint.digest
            self._manifest = manifest
            self._folder.write("manifest.json", _json(manifest))

    def _describe(self, file: str, value: object) -> None:
        """Writes a file that only explains, unless it says that already."""
        assert self._folder is not None
        data = _json(value)
        with contextlib.suppress(OSError, Untrusted):  # it is not there, or something else is: it is written
            if self._folder.read(file) == data:
                return
        self._folder.write(file, data)

    def _checksum(self, name: str, arguments: str, data: bytes) -> str:
        return seal([self.fingerprint.digest, name, arguments], data)

    @staticmethod
    def _entries_digest(manifest: Manifest) -> str:
        text = json.dumps({name: entry["checksum"] for name, entry in manifest["entries"].items()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def shorten(lines: Sequence[str], count: int = 8, width: int = 300) -> str:
    """At most ``count`` lines of at most ``width`` characters, as one."""
    shown = [line if len(line) <= width else line[:width] + "..." for line in lines[:count]]
    return "; ".join(shown + ([f"and {len(lines) - count} more"] if len(lines) > count else []))


def _empty_manifest() -> Manifest:
    return {"format": FORMAT, "fingerprint": "", "resolved": {}, "entries": {}, "proof": None}


def check_manifest(manifest: object) -> Manifest:
    """The manifest; raises `ValueError` unless every field that is read later has its type."""
    if not isinstance(manifest, dict):
        raise ValueError("it is not a JSON object")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"its format is {manifest.get('format')!r}, this version writes {FORMAT}")
    if not isinstance(manifest.get("fingerprint"), str) or not isinstance(manifest.get("resolved"), dict):
        raise ValueError("fields are missing")
    proof = manifest.get("proof")
    if proof is not None and not (isinstance(proof, dict) and isinstance(proof.get("entries"), str)):
        raise ValueError("its proof is malformed")
    entries = manifest.get("entries")
    if not isinstance(entries, dict):
        raise ValueError("it has no entries")
    for name, entry in entries.items():
        fields = {"file": str, "checksum": str, "size": int, "arguments": str}
        if not isinstance(entry, dict) or not all(isinstance(entry.get(field), kind) for field, kind in fields.items()):
            raise ValueError(f"its entry {name!r} is malformed")
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", entry["file"]):
            raise ValueError(f"its entry {name!r} names the path {entry['file']!r}")
    return cast(Manifest, manifest)


def _pack(artifact: Artifact) -> bytes:
    tree = pickle.dumps(artifact.out_tree)
    return b"".join((len(tree).to_bytes(_HEADER, "big"), tree, artifact.payload))


def _unpack(data: bytes) -> Artifact | Miss:
    view = memoryview(data)
    length = int.from_bytes(view[:_HEADER], "big")
    try:
        tree = pickle.loads(view[_HEADER : _HEADER + length])
    except Exception as error:  # a pickle raises whatever its classes raise: a field or class that is no more
        return Miss(f"its output tree cannot be read: {type(error).__name__}: {error}")
    return Artifact(view[_HEADER + length :], tree)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
