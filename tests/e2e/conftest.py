import pathlib

import pytest
from server_process import serving

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_llama"
OPTIONS = ("--slots", "4", "--max-len", "160", "--prefill-buckets", "16,32,64", "--served-model-name", "tiny", "--max-queue", "64")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One warmup cache for all servers of the session: what one compiles, the next loads."""
    folder = tmp_path_factory.mktemp("warmup-cache")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="session", params=["manual", "aot"])
def server(request, cache):
    with serving(TINY, cache, *OPTIONS, "--warmup", request.param, "--tool-format", "hermes") as server:
        server.mode = request.param
        yield server
