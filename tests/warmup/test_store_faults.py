"""Every fault of the cache: the start still succeeds, with the right tokens, and one line says which entry and why."""

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path

import jax
import pytest

from tests.warmup import toy
from warmup import fingerprint as fingerprints
from warmup.manual import use_persistent_cache

pytestmark = pytest.mark.slow

root_only = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
not_root = pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root can write read-only folders")


@pytest.fixture
def root(tmp_path):
    yield tmp_path / "cache"
    for path in [tmp_path, *tmp_path.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    use_persistent_cache(None)
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
    """A filled cache: the folder of the programs, and the file of one of them."""
    shutil.copytree(template, root)
    (folder,) = (root / "programs").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    return folder, folder / manifest["entries"]["generate/2"]["file"]


def again(root, caplog) -> tuple[dict, list[str]]:
    """Starts once more; the result, and the lines of warning."""
    caplog.clear()
    jax.clear_caches()
    result = toy.warm("aot", root)
    assert result["tokens"] == toy.TOKENS and result["serving"]["compiles"] == 0
    return result, [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def compiled(result: dict) -> list[str]:
    return [name for name, source in result["sources"].items() if source == "compiled"]


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


def link(file: Path) -> None:
    moved = file.with_name("elsewhere")
    file.rename(moved)
    file.symlink_to(moved)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (truncate, "bytes instead of"),
        (garbage, "checksum"),
        (flip, "checksum"),
        (empty, "has 0 bytes instead of"),
        (Path.unlink, "is missing"),
        (folder_in_its_place, "plain file|cannot be read"),
        (link, "cannot be read"),
        (lambda file: file.chmod(0o666), "written by others"),
    ],
    ids=["truncated", "garbage", "one bit", "empty", "missing", "folder", "link", "world-writable"],
)
def test_a_faulty_entry_alone_is_compiled_again_and_replaced(root, filled, caplog, fault, why):
    _, file = filled
    fault(file)
    result, lines = again(root, caplog)
    assert compiled(result) == ["generate/2"]
    assert len(lines) == 1 and "program generate/2 again" in lines[0]
    assert re.search(why, lines[0])
    result, lines = again(root, caplog)
    assert compiled(result) == [] and lines == []


def test_an_entry_with_the_right_checksum_that_cannot_be_loaded(root, filled, caplog):
    folder, file = filled
    manifest = json.loads((folder / "manifest.json").read_text())
    other = manifest["entries"]["generate/2"]
    data = (0).to_bytes(8, "big") + b"not an executable"
    file.write_bytes(data)
    other.update(size=len(data), checksum=hashlib.sha256(data).hexdigest())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    result, lines = again(root, caplog)
    assert compiled(result) == ["generate/2"]
    assert len(lines) == 1 and "generate/2" in lines[0] and "cannot be read" in lines[0]


def test_entries_exchanged_between_programs_do_not_run(root, filled, caplog):
    """An executable of other shapes passes every checksum; its touch-run fails, and it is compiled again."""
    folder, _ = filled
    manifest = json.loads((folder / "manifest.json").read_text())
    entries = manifest["entries"]
    for field in ("file", "checksum", "size"):
        entries["prefill/32"][field] = entries["prefill/16"][field]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    result, lines = again(root, caplog)
    assert compiled(result) == ["prefill/32"]
    assert any("compiling program prefill/32 again" in line for line in lines)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00garbage", b"[]", b'{"format": 99}', b'{"format": 1, "entries": 3}']
)
def test_a_faulty_manifest_compiles_all_and_is_replaced(root, filled, caplog, content):
    (filled[0] / "manifest.json").write_bytes(content)
    result, lines = again(root, caplog)
    assert len(compiled(result)) == 7
    assert len(lines) == 1 and "manifest.json cannot be used" in lines[0]
    result, lines = again(root, caplog)
    assert compiled(result) == [] and lines == []


def test_an_entry_that_names_a_path_outside_is_refused(root, filled, caplog):
    text = (filled[0] / "manifest.json").read_text().replace(filled[1].name, "../" + filled[1].name)
    (filled[0] / "manifest.json").write_text(text)
    result, lines = again(root, caplog)
    assert len(compiled(result)) == 7 and "names the path" in lines[0]


def test_another_version_is_explained(root, filled, caplog, monkeypatch):
    real = fingerprints.importlib.metadata.version
    monkeypatch.setattr(
        fingerprints.importlib.metadata, "version", lambda name: "0.99" if name == "jaxlib" else real(name)
    )
    caplog.set_level(logging.INFO)
    result = toy.warm("aot", root)
    assert len(compiled(result)) == 7 and result["tokens"] == toy.TOKENS
    (line,) = [record.getMessage() for record in caplog.records if "compiling all 7 programs" in record.getMessage()]
    assert f'versions.jaxlib: "{real("jaxlib")}" -> "0.99"' in line and ";" not in line  # and nothing else differs


def test_other_arguments_are_explained(root, filled, caplog):
    result = toy.warm("aot", root, config=toy.engine_config(kv_pages=6))
    assert result["tokens"] == toy.TOKENS
    lines = [record.getMessage() for record in caplog.records if "program generate/2 again" in record.getMessage()]
    assert len(lines) == 1 and "-.pages: float32[5, 8]" in lines[0] and "+.pages: float32[6, 8]" in lines[0]
    # The program that makes the state takes no argument that would tell.
    lines = [record.getMessage() for record in caplog.records if "program init_state again" in record.getMessage()]
    assert len(lines) == 1 and "-kv_pages: 5; +kv_pages: 6" in lines[0]


def test_a_world_writable_folder_is_neither_read_nor_written(root, filled, caplog):
    folder, file = filled
    folder.chmod(0o777)
    before = sorted(path.name for path in folder.iterdir())
    file.write_bytes(b"x")  # would be a fault if it were read
    result, lines = again(root, caplog)
    assert len(compiled(result)) == 7 and result["stored"] == []
    assert len(lines) == 1 and "can be written by others" in lines[0] and str(folder) in lines[0]
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_world_writable_parent_within_the_cache_counts_too(root, filled, caplog):
    root.chmod(0o772)
    result, lines = again(root, caplog)
    assert len(compiled(result)) == 7 and len(lines) == 1 and str(root) in lines[0]


@root_only
@pytest.mark.parametrize("which", ["folder", "root"])
def test_a_folder_of_someone_else_is_not_used(root, filled, caplog, which):
    path = filled[0] if which == "folder" else root
    os.chown(path, 12345, 12345)
    result, lines = again(root, caplog)
    assert len(compiled(result)) == 7
    assert len(lines) == 1 and "belongs to user 12345" in lines[0]
    os.chown(path, 0, 0)


@root_only
def test_a_file_of_someone_else_is_not_read(root, filled, caplog):
    os.chown(filled[1], 12345, 12345)
    result, lines = again(root, caplog)
    assert compiled(result) == ["generate/2"] and "belongs to user 12345" in lines[0]


def test_a_file_in_the_place_of_the_cache(root, caplog):
    root.write_text("a file")
    result, lines = again(root, caplog)
    assert len(compiled(result)) == 7
    assert len(lines) == 1 and "not a folder" in lines[0]
    assert root.read_text() == "a file"


def test_a_file_in_the_place_of_a_parent(root, caplog):
    root.write_text("a file")
    result, lines = again(root / "below", caplog)
    assert len(compiled(result)) == 7 and len(lines) == 1 and "warmup cache not used" in lines[0]


def read_only(monkeypatch, folder: Path) -> None:
    """Read-only also for root, who may write anywhere: what the store asks and does says no."""
    real_access, real_open = os.access, os.open

    def access(path, mode, **options):
        return False if mode == os.W_OK and str(path).startswith(str(folder)) else real_access(path, mode, **options)

    def no_writing(path, flags, *rest, **options):
        if flags & os.O_CREAT and str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(os, "open", no_writing)


def test_a_read_only_folder_is_read(root, filled, caplog, monkeypatch):
    folder, file = filled
    file.unlink()
    read_only(monkeypatch, root)
    result, lines = again(root, caplog)
    assert compiled(result) == ["generate/2"]
    assert sorted("read-only" in line for line in lines) == [False, True]
    assert not file.exists()


# The same faults for JAX's own cache in manual mode.


@pytest.mark.parametrize("fault", [truncate, garbage, empty])
def test_manual_removes_faulty_entries(root, filled, caplog, fault):
    victim = next((root / "xla").glob("jit_insert-*-cache"))
    fault(victim)
    jax.clear_caches()
    caplog.clear()
    result = toy.warm("manual", root)
    assert result["tokens"] == toy.TOKENS and compiled(result) == ["insert"]
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1 and victim.name in lines[0] and "truncated or garbage" in lines[0]
    jax.clear_caches()
    assert compiled(toy.warm("manual", root)) == []


@pytest.mark.parametrize("fault", [lambda root: (root / "xla").chmod(0o777), lambda root: root.chmod(0o777)])
def test_manual_does_not_use_a_folder_that_others_can_write(root, filled, caplog, fault):
    fault(root)
    jax.clear_caches()
    caplog.clear()
    result = toy.warm("manual", root)
    assert result["tokens"] == toy.TOKENS and len(compiled(result)) == 7
    assert any("can be written by others" in record.getMessage() for record in caplog.records)


def test_manual_with_a_file_in_the_place_of_the_cache(root, caplog):
    root.write_text("a file")
    assert toy.warm("manual", root)["tokens"] == toy.TOKENS
    assert sum("not a folder" in record.getMessage() for record in caplog.records) == 1


def test_manual_reads_a_read_only_folder(root, filled, caplog, monkeypatch):
    next((root / "xla").glob("jit_insert-*-cache")).unlink()
    jax.clear_caches()
    read_only(monkeypatch, root)
    result = toy.warm("manual", root)
    assert result["tokens"] == toy.TOKENS and compiled(result) == ["insert"]
    assert not list((root / "xla").glob("jit_insert-*-cache"))
