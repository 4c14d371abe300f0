"""The folder of the socket between proxy and server: what killed processes leave behind goes, and nothing else does."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from server.errors import StartError
from server.grpc import private_folder
from server.grpc.private_folder import PREFIX, PrivateFolder, remove_abandoned
from server.grpc.server import GrpcServer
from server.telemetry.metrics import Metrics

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def parent(short_folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    return short_folder


@pytest.fixture
def other(parent):
    """Another process with a private folder, and a socket in it; what it says of itself: the folder."""
    script = (
        "import socket, sys; from server.grpc.private_folder import PrivateFolder; folder = PrivateFolder(); "
        "socket.socket(socket.AF_UNIX).bind(str(folder.path / 'grpc.sock')); print(folder.path, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "TMPDIR": str(parent)}
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPO, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_the_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays(parent, other):
    process, folder = other
    first = PrivateFolder()
    assert (folder / "grpc.sock").is_socket() and first.path != folder  # it lives
    process.kill()
    process.wait()
    second = PrivateFolder()
    assert sorted(parent.iterdir()) == sorted([first.path, second.path])
    assert second.path.stat().st_mode & 0o777 == 0o700
    first.remove()
    second.remove()
    second.remove()
    assert list(parent.iterdir()) == []


def test_what_is_not_ours_stays(parent):
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "file").write_text("kept")
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    (parent / f"{PREFIX}file").write_text("kept")
    (parent / f"{PREFIX}open").mkdir(mode=0o755)
    (parent / "preheat-something").mkdir(mode=0o700)
    if os.geteuid() == 0:
        (parent / f"{PREFIX}other").mkdir(mode=0o700)
        os.chown(parent / f"{PREFIX}other", 12345, 12345)
    before = sorted(parent.rglob("*"))
    assert remove_abandoned(parent) == []
    assert sorted(parent.rglob("*")) == before
    (parent / f"{PREFIX}ours").mkdir(mode=0o700)
    assert remove_abandoned(parent) == [parent / f"{PREFIX}ours"]
    assert sorted(parent.rglob("*")) == before


def test_a_folder_taken_for_abandoned_before_it_is_locked_is_made_again(parent, monkeypatch):
    lock, removed = private_folder._lock, []

    def late(folder):
        if not removed:
            removed.append(folder)
            folder.rmdir()  # as another process that starts at the same moment
        return lock(folder)

    monkeypatch.setattr(private_folder, "_lock", late)
    folder = PrivateFolder()
    assert removed and folder.path not in removed and folder.path.is_dir()
    folder.remove()


def test_without_locks_nothing_is_removed(parent, monkeypatch):
    (parent / f"{PREFIX}left").mkdir(mode=0o700)

    def none(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(private_folder.fcntl, "flock", none)
    folder = PrivateFolder()
    assert (parent / f"{PREFIX}left").is_dir() and folder.path.is_dir()
    folder.remove()


def test_a_server_has_one_while_it_lives_and_clears_away_what_was_left(parent, other):
    process, folder = other
    process.kill()
    process.wait()
    server = GrpcServer("mock", metrics=Metrics())
    server.start()
    try:
        (mine,) = parent.iterdir()
        assert mine != folder and server.local_address == f"unix:{mine}/grpc.sock"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(mine / "grpc.sock"))
    finally:
        server.stop()
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("depth", [1, 120])
def test_a_temporary_directory_that_cannot_be_used_is_named(tmp_path, monkeypatch, depth):
    """One that is not there, and one whose sockets would have paths of more than the 108 bytes of Linux's ``sun_path``."""
    long = tmp_path / ("x" * depth)
    if depth > 100:
        long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(StartError, match=f"{long}.*TMPDIR"):
        GrpcServer("mock", metrics=Metrics()).start()
    assert depth == 1 or list(long.iterdir()) == []
