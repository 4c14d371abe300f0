"""The artifact store: compiled programs on disk, one folder per fingerprint.

Layout under the cache's root (``--warmup-cache``)::

    programs/<fingerprint>/fingerprint.json   the components of the fingerprint, for people and for a diff
    programs/<fingerprint>/manifest.json      what was resolved, the entries with checksums, the proof
    programs/<fingerprint>/arguments.json     the abstract arguments of each program, for the diff
    programs/<fingerprint>/<program>-<checksum>.bin
    xla/                                      JAX's persistent cache (manual mode)

An entry's file is named after its content, so several processes may fill one folder: none overwrites what another's
manifest refers to, and the manifest itself is merged under a lock and replaced atomically. A process that dies
half-way leaves files that no manifest names; `prune` removes them.

The store never fails a start. What it cannot read is a `Miss` with a reason, and is compiled again; what it cannot
write is one warning. Trust: ``warmup/trust.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from warmup import trust
from warmup.fingerprint import Fingerprint, Json
from warmup.trust import Untrusted

try:
    import fcntl
except ImportError:  # not on Windows: the last writer of a manifest wins there
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

FORMAT = 1  # of manifest and entries; another number is another world
_HEADER = 8  # bytes: length of the pickled trees that stand before the executable


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A serialized executable with the output tree that calling it needs.

    ``out_tree`` is the output's pytree with integers as leaves, so that a tree definition is made from it without
    tracing. The input tree needs no storing: it is that of the program's arguments.
    """

    payload: bytes | memoryview
    out_tree: Any


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
        self.root: Path | None = None
        self.folder: Path | None = None
        self.writable = False
        self._lock = threading.Lock()
        self._manifest: dict[str, Any] = _empty_manifest()
        self.fresh = True  # the folder held no manifest of this fingerprint
        if root is not None:
            self._open(Path(os.path.realpath(root)))

    def _open(self, root: Path) -> None:
        folder = root / "programs" / self.fingerprint.digest
        try:
            trust.make_folder(root, folder)
        except Untrusted as error:
            logger.warning("warmup cache not used: %s", error)
            return
        except OSError as error:
            if not folder.is_dir():
                logger.warning("warmup cache not used: cannot create %s: %s", folder, error.strerror)
                return
        self.root, self.folder = root, folder
        self.writable = os.access(folder, os.W_OK)
        if not self.writable:
            logger.warning("warmup cache %s is read-only: new programs are not stored", folder)
        self._manifest = self._read_manifest(complain=True)
        self.fresh = not self._manifest["entries"]
        self._write("fingerprint.json", _json(self.fingerprint.components), only_if_missing=True)
        if self.writable:
            with contextlib.suppress(OSError):
                os.utime(folder)  # last used, for `warmup.cache.prune`

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
        if self.folder is None:
            return {}
        return {name: self.folder / entry["file"] for name, entry in self._manifest["entries"].items()}

    def load(self, name: str, arguments: str, lines: Callable[[], list[str]]) -> Artifact | Miss:
        """Reads and checks one entry. Thread-safe.

        ``arguments`` is the digest of the program's abstract arguments; ``lines`` describes them, for the message if
        they differ.
        """
        if self.folder is None:
            return Miss("no cache", quiet=True)
        entry = self._manifest["entries"].get(name)
        if entry is None:
            return Miss("not in the cache", quiet=True)
        if entry["arguments"] != arguments:
            return Miss(f"made for other arguments: {self._explain_arguments(name, lines())}")
        try:
            data = trust.read(self.folder / entry["file"])
        except FileNotFoundError:
            return Miss(f"its file {entry['file']} is missing")
        except Untrusted as error:
            return Miss(str(error))
        except OSError as error:
            return Miss(f"its file {entry['file']} cannot be read: {error.strerror}")
        if len(data) != entry["size"]:
            return Miss(f"its file {entry['file']} has {len(data)} bytes instead of {entry['size']}")
        if hashlib.sha256(data).hexdigest() != entry["checksum"]:
            return Miss(f"its file {entry['file']} has another checksum than the manifest")
        return _unpack(data)

    # Writing.

    def put(self, name: str, artifact: Artifact, arguments: str) -> Pending | None:
        """Writes an entry's file; `commit` makes it valid once it has run. `None` if it could not be written."""
        data = _pack(artifact)
        checksum = hashlib.sha256(data).hexdigest()
        file = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{checksum[:16]}.bin"
        if not self._write(file, data):
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
                fields = dataclasses.asdict(item)
                manifest["entries"][fields.pop("name")] = fields
            manifest["proof"] = None  # these have not been through a proof
        if arguments is not None and groups is not None:
            self._write("arguments.json", _json({"programs": dict(arguments), "groups": dict(groups)}))

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
        return bool(proof) and proof["entries"] == self._entries_digest(self._manifest)

    # Explaining.

    def explain_miss(self) -> str:
        """One line on why nothing is stored for this fingerprint: what differs from the nearest older one."""
        nearest: list[str] | None = None
        for folder in self._siblings():
            try:
                components = json.loads(trust.read(folder / "fingerprint.json"))
                lines = self.fingerprint.diff(components)
            except (OSError, Untrusted, ValueError, AttributeError):
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
        assert self.folder is not None
        try:
            stored = json.loads(trust.read(self.folder / "arguments.json"))
            old = [line for group in stored["programs"][name] for line in stored["groups"][group]]
        except (OSError, Untrusted, ValueError, KeyError, TypeError):
            return "their description is not stored"
        changed = [f"-{line}" for line in old if line not in lines] + [f"+{line}" for line in lines if line not in old]
        return shorten(changed) or "another order"

    # The manifest.

    def _read_manifest(self, *, complain: bool) -> dict[str, Any]:
        """The manifest, or an empty one. Whatever is wrong with it, everything is compiled again."""
        assert self.folder is not None
        path = self.folder / "manifest.json"
        try:
            manifest = json.loads(trust.read(path))
            check_manifest(manifest)
            if manifest["fingerprint"] != self.fingerprint.digest:
                raise ValueError(f"it belongs to fingerprint {manifest['fingerprint']}")
            return manifest
        except FileNotFoundError:
            pass
        except (OSError, Untrusted, ValueError) as error:
            if complain:
                logger.warning("warmup cache: %s cannot be used, all programs are compiled again: %s", path, error)
        return _empty_manifest()

    @contextlib.contextmanager
    def _update(self) -> Iterator[dict[str, Any]]:
        """Reads, changes and replaces the manifest under a lock between threads and processes."""
        if self.folder is None or not self.writable:
            yield self._manifest  # this process alone
            return
        with self._lock, self._file_lock():
            manifest = self._read_manifest(complain=False)
            yield manifest
            manifest["fingerprint"] = self.fingerprint.digest
            self._manifest = manifest
            self._write("manifest.json", _json(manifest))

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[None]:
        assert self.folder is not None
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)  # another process may have pruned it
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._stop_writing(error)
            yield
            return
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, file: str, data: bytes, *, only_if_missing: bool = False) -> bool:
        if self.folder is None or not self.writable:
            return False
        path = self.folder / file
        if only_if_missing and path.exists():
            return True
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            trust.write_atomic(path, data)
        except OSError as error:
            self._stop_writing(error)
            return False
        return True

    def _stop_writing(self, error: OSError) -> None:
        if self.writable:
            self.writable = False
            logger.warning(
                "warmup cache %s cannot be written, going on without storing: %s", self.folder, error.strerror
            )

    @staticmethod
    def _entries_digest(manifest: Mapping[str, Any]) -> str:
        text = json.dumps({name: entry["checksum"] for name, entry in manifest["entries"].items()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def shorten(lines: Sequence[str], count: int = 8, width: int = 300) -> str:
    """At most ``count`` lines of at most ``width`` characters, as one."""
    shown = [line if len(line) <= width else line[:width] + "..." for line in lines[:count]]
    return "; ".join(shown + ([f"and {len(lines) - count} more"] if len(lines) > count else []))


def _empty_manifest() -> dict[str, Any]:
    return {"format": FORMAT, "fingerprint": "", "resolved": {}, "entries": {}, "proof": None}


def check_manifest(manifest: object) -> None:
    """Raises `ValueError` unless every field that is read later has its type."""
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
        if Path(entry["file"]).name != entry["file"]:
            raise ValueError(f"its entry {name!r} names the path {entry['file']!r}")


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
