"""Every fault of the caches: the start still succeeds, with the right tokens, and one line says which entry and why.

Both modes, with the same faults: AOT's store, and JAX's persistent cache in manual mode. The tokens of the toy are known by hand.
"""

import json
import logging
import os
import re
import shutil
import threading
from pathlib import Path

import jax
import pytest

from tests.warmup import toy
from warmup import fingerprint as fingerprints
from warmup import folder as folders
from warmup.errors import WarmupError
from warmup.fingerprint import ArgumentDescriber
from warmup.folder import Folder
from warmup.prepare import open_store
from warmup.store import Artifact, Miss
from warmup.xla_cache import XlaCache, use_xla_cache

pytestmark = pytest.mark.slow

MODES = ("aot", "manual")
NAMES = ["init_state", "init_prefix", "prefill/16", "prefill/32", "insert", "generate/1", "generate/2"]
root_only = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
both_modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def root(tmp_path):
    yield tmp_path / "cache"
    for path in [tmp_path, *tmp_path.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    use_xla_cache(None, "")
    jax.config.update("jax_enable_compilation_cache", True)
    jax.clear_caches()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A cache that an AOT and a manual start have filled."""
    root = tmp_path_factory.mktemp("template") / "cache"
    toy.warm("aot", root)
    toy.warm("manual", root)
    return root


@pytest.fixture
def filled(root, template):
    """A filled cache: the folder of each mode."""
    shutil.copytree(template, root)
    return {mode: next((root / {"aot": "programs", "manual": "xla"}[mode]).iterdir()) for mode in MODES}


def entries(mode: str, folder: Path) -> list[Path]:
    """The files of all seven programs."""
    files = sorted(folder.glob({"aot": "*.bin", "manual": "*-cache"}[mode]))
    assert len(files) == len(NAMES)
    return files


def insert_of(mode: str, folder: Path) -> Path:
    """The file of the program ``insert``."""
    (file,) = folder.glob({"aot": "insert-*.bin", "manual": "jit_insert-*-cache"}[mode])
    return file


def store_of(root, **changes):
    engine = toy.ToyEngine()
    return open_store(root, engine.model, engine.config, engine.devices, **changes)


def again(mode, root, caplog, *, tokens=toy.TOKENS, **options) -> tuple[list[str], list[str]]:
    """Starts once more; which programs were compiled, and the lines of warning."""
    caplog.clear()
    jax.clear_caches()
    result = toy.warm(mode, root, **options)
    assert result["tokens"] == tokens and result["serving"]["compiles"] == result["serving"]["traces"] == 0
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [name for name, source in result["sources"].items() if source == "compiled"], lines


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def garbage(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * (file.stat().st_size // 256) + b"x" * (file.stat().st_size % 256))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def folder_in_its_place(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside").write_text("x")


def pipe_in_its_place(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link(file: Path) -> None:
    moved = file.with_name("elsewhere")
    file.rename(moved)
    file.symlink_to(moved)


OTHER = "bytes instead of|checksum|not hold what was stored"
CONTENT_FAULTS = {"truncated": (truncate, OTHER), "garbage": (garbage, OTHER), "one bit": (flip, OTHER), "empty": (empty, OTHER)}
FILE_FAULTS = {
    "folder": (folder_in_its_place, "Is a directory|not a plain file"),
    "pipe": (pipe_in_its_place, "not a plain file"),
    "link": (link, "cannot be read"),
    "world-writable": (lambda file: file.chmod(0o666), "written by others"),
}


@both_modes
@pytest.mark.parametrize("faults", [CONTENT_FAULTS, FILE_FAULTS], ids=["content", "file"])
def test_faulty_entries_alone_are_compiled_again_and_replaced(root, filled, caplog, mode, faults):
    """Each fault for another entry."""
    spoilt = dict(zip(faults, entries(mode, filled[mode]), strict=False))
    for fault, file in spoilt.items():
        faults[fault][0](file)
    compiled, lines = again(mode, root, caplog)
    assert len(compiled) == len(lines) == len(faults)
    for fault, file in spoilt.items():
        (line,) = [line for line in lines if file.name in line]
        assert re.search(r"compiling (program |jit_)\S+ again: ", line) and re.search(faults[fault][1], line), fault
    assert again(mode, root, caplog) == ([], [])


@both_modes
def test_entries_that_the_system_does_not_read(root, filled, caplog, monkeypatch, mode):
    forbidden, broken, *_ = entries(mode, filled[mode])
    errors = {str(forbidden): PermissionError(13, "Permission denied"), str(broken): OSError(5, "Input/output error")}
    real_open = os.open

    def no_reading(path, flags, *rest, **options):
        if str(path) in errors:
            raise errors[str(path)]
        return real_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", no_reading)  # root may read everything
    compiled, lines = again(mode, root, caplog)
    assert len(compiled) == len(lines) == 2
    for file, error in errors.items():
        assert sum(Path(file).name in line and f"cannot be read: {error.strerror}" in line for line in lines) == 1


@both_modes
def test_a_missing_entry_is_compiled_again(root, filled, caplog, mode):
    insert_of(mode, filled[mode]).unlink()
    compiled, lines = again(mode, root, caplog)
    assert compiled == ["insert"]
    assert len(lines) == (mode == "aot")  # whose manifest names it
    assert again(mode, root, caplog) == ([], [])


@both_modes
def test_exchanged_contents_are_all_compiled_again(root, filled, caplog, mode):
    """Each entry is a valid one of another program."""
    files = entries(mode, filled[mode])
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)
    compiled, lines = again(mode, root, caplog)
    assert compiled == NAMES and len(lines) == len(NAMES)
    assert all(sum(file.name in line for line in lines) == 1 for file in files)
    assert again(mode, root, caplog) == ([], [])


def test_entries_exchanged_in_the_manifest_do_not_run(root, filled, caplog):
    manifest = json.loads((filled["aot"] / "manifest.json").read_text())
    found = manifest["entries"]
    for field in ("file", "checksum", "size"):
        found["prefill/32"][field], found["prefill/16"][field] = found["prefill/16"][field], found["prefill/32"][field]
    (filled["aot"] / "manifest.json").write_text(json.dumps(manifest))
    compiled, lines = again("aot", root, caplog)
    assert compiled == ["prefill/16", "prefill/32"] and len(lines) == 2
    assert again("aot", root, caplog) == ([], [])


def test_an_exchanged_entry_with_the_same_signature_does_not_run(root, caplog):
    """It would run without complaint and give other tokens: twice the step."""
    one_row = {"config": toy.engine_config(batch_sizes=(1,))}

    def start(step):
        before = set((root / "xla").glob("*/jit_generate-*"))
        assert again("manual", root, caplog, tokens=[8.0 * step, 16.0 * step, 24.0 * step], step=step, **one_row)[1] == []
        (file,) = set((root / "xla").glob("*/jit_generate-*")) - before
        return file

    single, double = start(1), start(2)
    assert single.stat().st_size and single.read_bytes()[64:] != double.read_bytes()[64:]
    shutil.copy(double, single)
    compiled, lines = again("manual", root, caplog, tokens=[8.0, 16.0, 24.0], **one_row)
    assert compiled == ["generate/1"] and len(lines) == 1 and single.name in lines[0]


def test_a_stored_entry_is_bound_to_name_arguments_and_fingerprint(root):
    store = store_of(root)
    store.commit([store.put(name, Artifact(name.encode(), (0,)), "x") for name in ("a", "b")])
    assert bytes(store.load("a", "x", list).payload) == b"a"
    manifest = json.loads((store.folder / "manifest.json").read_text())
    manifest["entries"]["a"] = manifest["entries"]["b"]
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    store = store_of(root)
    assert isinstance(store.load("a", "x", list), Miss) and bytes(store.load("b", "x", list).payload) == b"b"
    manifest["entries"]["b"]["arguments"] = "y"
    other = store_of(root, budget=1)
    for path in store.folder.glob("*.bin"):
        shutil.copy(path, other.folder)
    manifest["fingerprint"] = other.fingerprint.digest
    (other.folder / "manifest.json").write_text(json.dumps(manifest))
    other = store_of(root, budget=1)
    assert isinstance(other.load("b", "y", list), Miss)


# What a checksum cannot find: an entry that was wrong when it was stored.


def store_wrongly(mode: str, root: Path, name: str, other: str) -> None:
    """The program ``name`` gets the executable of ``other``, with valid checksums."""
    engine = toy.ToyEngine()
    store = open_store(root, engine.model, engine.config, engine.devices)
    programs = {program.name: program for program in engine.programs()}
    if mode == "aot":
        describer = ArgumentDescriber({"kv_pages": engine.config.kv_pages})
        mine, others = (describer.digest(programs[each]) for each in (name, other))
        artifact = store.load(other, others, list)
        store.commit([store.put(name, artifact, mine)])
        return
    keys = {}
    cache = use_xla_cache(root, store.fingerprint.platform)
    for each in (name, other):
        with cache.watch() as keys[each]:
            programs[each].trace().lower().compile()
    ((mine,), (others,)) = keys[name], keys[other]
    cache.put(mine, cache.get(others))


@both_modes
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("init_state", "prefill/16"),  # other arguments: does not even load
        ("insert", "init_prefix"),  # other results
        ("prefill/32", "prefill/16"),  # other shapes
        ("generate/2", "generate/1"),  # the same, and it donates the decode state
    ],
)
def test_what_cannot_be_loaded_or_run_is_compiled_without_the_cache_once(root, filled, caplog, mode, name, other):
    store_wrongly(mode, root, name, other)
    compiled, lines = again(mode, root, caplog)
    assert compiled == [name]
    assert len(lines) == 1 and f"compiling program {name} again" in lines[0]



@pytest.mark.filterwarnings("default:Error reading persistent compilation cache entry")
def test_a_stored_entry_that_jax_cannot_read_is_compiled_again_and_replaced(root, filled, caplog):
    file = insert_of("manual", filled["manual"])
    cache = XlaCache(Folder(root, filled["manual"]), filled["manual"].name)
    cache.put(file.name.removesuffix("-cache"), b"not compressed")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry for 'jit_insert'"):
        assert again("manual", root, caplog) == (["insert"], [])
    assert again("manual", root, caplog) == ([], [])


@both_modes
def test_a_first_run_that_fails_may_take_the_donated_buffers_along(root, filled, caplog, mode):
    compiled, lines = again(mode, root, caplog, break_once="generate/1")
    assert compiled == ["generate/1"]
    assert len(lines) == 1 and "program generate/1 again: program generate/1 failed to run: RuntimeError: broken once" in lines[0]
    # What did not come out of a cache is not compiled again.
    with pytest.raises(WarmupError, match="program generate/1 failed to run: RuntimeError: broken once"):
        toy.warm(mode, None, break_once="generate/1")


@both_modes
def test_buffers_that_cannot_be_made_with_programs_of_the_cache(root, filled, caplog, mode):
    compiled, lines = again(mode, root, caplog, break_once="allocate")
    assert compiled == ["init_state", "init_prefix"]
    assert len(lines) == 2 and all("buffers cannot be made: RuntimeError: broken once" in line for line in lines)
    with pytest.raises(RuntimeError, match="broken once"):
        toy.warm(mode, None, break_once="allocate")


# The files beside the entries.


MANIFEST_FAULTS = {
    "empty": b"",
    "garbage": b"\xff\xfe\x00garbage",
    "no object": b"[]",
    "another format": b'{"format": 99}',
    "no entries": b'{"format": 2, "fingerprint": "", "resolved": {}, "entries": 3}',
    "too deep": b"[" * 100_000,
    "NUL in a name": (
        b'{"format": 2, "fingerprint": "", "resolved": {}, "entries": '
        b'{"insert": {"file": "a\\u0000b", "checksum": "", "size": 1, "arguments": ""}}}'
    ),
}


@pytest.mark.parametrize("fault", MANIFEST_FAULTS)
def test_a_faulty_manifest_is_as_none(root, filled, caplog, fault):
    (filled["aot"] / "manifest.json").write_bytes(MANIFEST_FAULTS[fault])
    store = store_of(root)
    assert store.names == () and store.resolved == {} and not store.proven
    assert len(caplog.messages) == 1 and "manifest.json cannot be used" in caplog.messages[0]


def test_a_faulty_manifest_compiles_all_and_is_replaced(root, filled, caplog):
    (filled["aot"] / "manifest.json").write_bytes(b"[")
    compiled, lines = again("aot", root, caplog)
    assert compiled == NAMES and len(lines) == 1 and "manifest.json cannot be used" in lines[0]
    assert again("aot", root, caplog) == ([], [])


def test_folders_in_the_place_of_the_files_beside_are_replaced(root, filled, caplog):
    for name in ("manifest.json", "fingerprint.json", "arguments.json", ".lock"):
        folder_in_its_place(filled["aot"] / name)
    compiled, lines = again("aot", root, caplog)
    assert compiled == NAMES and len(lines) == 1 and "manifest.json cannot be used" in lines[0]
    assert again("aot", root, caplog) == ([], [])
    assert all(path.is_file() for path in filled["aot"].iterdir())


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[]", b'{"programs": [], "groups": {}}', b'{"programs": {"insert": [[]]}}'])
def test_files_that_only_explain_may_hold_anything(root, filled, caplog, content):
    (filled["aot"] / "arguments.json").write_bytes(content)
    assert "their description is not stored" in store_of(root).load("insert", "others", list).reason
    (filled["aot"] / "fingerprint.json").write_bytes(content)
    assert isinstance(store_of(root, budget=1).explain_miss(), str)
    assert caplog.messages == []


def test_an_entry_that_names_a_path_outside_is_refused(root, filled, caplog):
    manifest, name = filled["aot"] / "manifest.json", insert_of("aot", filled["aot"]).name
    manifest.write_text(manifest.read_text().replace(name, "../" + name))
    compiled, lines = again("aot", root, caplog)
    assert compiled == NAMES and "names the path" in lines[0]


def test_other_arguments_are_explained(root, filled, caplog):
    _, lines = again("aot", root, caplog, config=toy.engine_config(kv_pages=6))
    (line,) = [line for line in lines if "program generate/2 again" in line]
    assert "-.pages: float32[5, 8]" in line and "+.pages: float32[6, 8]" in line
    # The program that makes the state takes no argument that would tell.
    (line,) = [line for line in lines if "program init_state again" in line]
    assert "-kv_pages: 5; +kv_pages: 6" in line


@both_modes
def test_entries_of_another_version_or_machine_are_not_used(root, filled, caplog, monkeypatch, mode):
    real = fingerprints.importlib.metadata.version
    changes = {
        "version": ("importlib.metadata.version", lambda name: "0.99" if name == "jaxlib" else real(name)),
        "machine": ("_cpu", lambda: {"machine": "another", "features": []}),
    }
    for what, (name, value) in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"warmup.fingerprint.{name}", value)
            with caplog.at_level(logging.INFO):
                assert again(mode, root, caplog) == (NAMES, [])
            if mode == "aot":
                (line,) = [line for line in caplog.messages if "compiling all 7 programs" in line]
                explained = f'versions.jaxlib: "{real("jaxlib")}" -> "0.99"' if what == "version" else "backend.cpu.machine"
                assert explained in line
    assert again(mode, root, caplog) == ([], [])  # this one is as it was
    # Nor where a folder was copied to where another machine looks.
    with monkeypatch.context() as patch:
        patch.setattr("warmup.fingerprint._cpu", lambda: {"machine": "a third"})
        fingerprint = store_of(None).fingerprint
        name = fingerprint.digest if mode == "aot" else fingerprint.platform
        shutil.copytree(filled[mode], filled[mode].with_name(name))
        compiled, lines = again(mode, root, caplog)
        assert compiled == NAMES and len(lines) == (1 if mode == "aot" else len(NAMES))


# The folders.


@pytest.mark.parametrize("which", ["folder", "parent", "root"])
def test_a_folder_that_others_can_write_is_not_used(root, filled, caplog, which):
    path = {"folder": filled["aot"], "parent": filled["aot"].parent, "root": root}[which]
    path.chmod(0o772)
    assert Folder.open(root, "programs", filled["aot"].name) is None
    assert len(caplog.messages) == 1 and f"{path} can be written by others" in caplog.messages[0]


@root_only
@pytest.mark.parametrize("which", ["folder", "parent", "root"])
def test_a_folder_of_someone_else_is_not_used(root, filled, caplog, which):
    path = {"folder": filled["aot"], "parent": filled["aot"].parent, "root": root}[which]
    os.chown(path, 12345, 12345)
    assert Folder.open(root, "programs", filled["aot"].name) is None
    assert len(caplog.messages) == 1 and f"{path} belongs to user 12345" in caplog.messages[0]
    os.chown(path, 0, 0)


@pytest.mark.parametrize("which", ["folder", "parent", "root", "the root's parent"])
def test_a_file_in_the_place_of_a_folder(root, filled, caplog, which):
    file = {"folder": filled["aot"], "parent": filled["aot"].parent}.get(which, root)
    shutil.rmtree(file)
    file.write_text("a file")
    assert Folder.open(root / "below" if which == "the root's parent" else root, "programs", filled["aot"].name) is None
    assert re.fullmatch("warmup cache not used: .*(is not a folder|cannot create).*", "".join(caplog.messages))
    assert file.read_text() == "a file"


@both_modes
def test_a_start_without_a_folder_that_can_be_used(root, filled, caplog, mode):
    filled[mode].chmod(0o777)
    before = sorted(path.name for path in filled[mode].iterdir())
    insert_of(mode, filled[mode]).write_bytes(b"x")  # would be a fault if it were read
    compiled, lines = again(mode, root, caplog)
    assert compiled == NAMES and len(lines) == 1 and "can be written by others" in lines[0]
    assert sorted(path.name for path in filled[mode].iterdir()) == before


@root_only
@both_modes
def test_a_file_of_someone_else_is_not_read(root, filled, caplog, mode):
    os.chown(insert_of(mode, filled[mode]), 12345, 12345)
    compiled, lines = again(mode, root, caplog)
    assert compiled == ["insert"] and len(lines) == 1 and "belongs to user 12345" in lines[0]


def read_only(monkeypatch, folder: Path) -> None:
    """Read-only also for root, who may write anywhere: what the caches ask and do says no."""
    real_access, real_open = os.access, os.open

    def access(path, mode, **options):
        return False if mode == os.W_OK and str(path).startswith(str(folder)) else real_access(path, mode, **options)

    def no_writing(path, flags, *rest, **options):
        if flags & os.O_CREAT and str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(os, "open", no_writing)


@both_modes
def test_a_read_only_folder_is_read(root, filled, caplog, monkeypatch, mode):
    file = insert_of(mode, filled[mode])
    flip(file)
    before = file.read_bytes()
    read_only(monkeypatch, filled[mode])
    for _ in range(2):
        compiled, lines = again(mode, root, caplog)
        assert compiled == ["insert"]
        assert sorted(("read-only" in line, file.name in line) for line in lines) == [(False, True), (True, False)]
    assert file.read_bytes() == before


@both_modes
def test_a_disk_that_is_full_is_one_warning(root, filled, caplog, monkeypatch, mode):
    for file in entries(mode, filled[mode])[:3]:
        flip(file)
    before = {path.name: path.read_bytes() for path in filled[mode].iterdir() if mode == "aot"}
    real_open = os.open

    def full(path, flags, *rest, **options):
        if flags & os.O_CREAT and str(path).startswith(str(root)):
            raise OSError(28, "No space left on device")
        return real_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", full)
    compiled, lines = again(mode, root, caplog)
    assert len(compiled) == 3 and len(lines) == 4
    (line,) = [line for line in lines if "again" not in line]
    assert "cannot be written, going on without storing: No space left on device" in line
    assert before == {path.name: path.read_bytes() for path in filled[mode].iterdir() if mode == "aot"}
    assert not list(root.rglob(".tmp-*"))


# While another process is at work.


@both_modes
def test_entries_spoilt_while_starting(root, filled, caplog, mode):
    def spoil():
        for file in entries(mode, filled[mode]):
            flip(file)

    compiled, lines = again(mode, root, caplog, meanwhile=spoil)
    assert compiled == NAMES and len(lines) == len(NAMES)
    assert again(mode, root, caplog) == ([], [])


@both_modes
def test_a_cache_deleted_while_starting_is_filled_again(root, filled, caplog, mode):
    previous = os.umask(0o002)  # with which folders made carelessly could be written by the group
    try:
        compiled, lines = again(mode, root, caplog, meanwhile=lambda: shutil.rmtree(root))
    finally:
        os.umask(previous)
    assert compiled == NAMES and len(lines) == (len(NAMES) if mode == "aot" else 0)
    assert again(mode, root, caplog) == ([], [])


def test_a_lock_that_is_never_released_is_one_warning(root, filled, caplog, monkeypatch):
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.05)
    insert_of("aot", filled["aot"]).unlink()
    with Folder(root, filled["aot"]).locked():
        compiled, lines = again("aot", root, caplog)
    assert compiled == ["insert"] and len(lines) == 2 and "another process does not release" in lines[1]


def test_a_file_system_without_locks_is_one_warning(root, filled, caplog, monkeypatch):
    def none(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", none)
    insert_of("aot", filled["aot"]).unlink()
    compiled, lines = again("aot", root, caplog)
    assert compiled == ["insert"] and len(lines) == 2 and "No locks available" in lines[1]


def test_processes_that_write_one_entry_at_once_never_read_half_of_it(root, caplog):
    """Each process has a cache of its own; readers get all of one writer's entry, or nothing."""
    values = [bytes([digit]) * 300_000 for digit in range(4)]
    found: list[bytes | None] = []

    def work(value):
        cache = XlaCache(Folder.open(root, "xla", "here"), "here")
        for _ in range(20):
            found.append(cache.get("jit_f-0"))
            cache.put("jit_f-0", value)

    threads = [threading.Thread(target=work, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and {*found} <= {None, *values} and {*found} & {*values}
    assert caplog.messages == []
