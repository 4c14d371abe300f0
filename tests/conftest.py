"""Strict settings for every test (eight fake devices, no silent promotion of dtypes or ranks), what tests may compile, and how they
are spread over the workers of pytest-xdist.

A test that compiles, or starts a process that does, is marked ``slow``; so are all of ``tests/e2e``. The others are `make
test-fast`. The mark is checked here: whatever compiles without it fails.
"""

import os
import pathlib
import re
import tempfile

from tests import xla

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {xla.flags(xla.QUICK)}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)  # the same on any machine, at any load
hypothesis.settings.load_profile("suite")

COMPILE = "/jax/core/compile/backend_compile_duration"  # also where JAX's persistent cache has the program
E2E = pathlib.Path(__file__).parent / "e2e"
compiled: list[str] = []  # names of jitted functions, since the last look


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: compiles, or starts a process that does; left out by `make test-fast`")
    jax.monitoring.register_event_duration_secs_listener(note_compile)


def note_compile(event, _seconds, *, fun_name="?", **_):
    if event == COMPILE:
        compiled.append(fun_name)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(E2E):
            item.add_marker("slow")


def refuse_compiles(item):
    """Around each phase of a test, its fixtures included."""
    compiled.clear()
    result = yield
    if compiled and item.get_closest_marker("slow") is None:
        names = ", ".join(sorted(set(compiled)))
        pytest.fail(f"compiles {names}, which takes long: mark it with pytest.mark.slow, or do without", pytrace=False)
    return result


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(refuse_compiles)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(refuse_compiles)
pytest_runtest_teardown = pytest.hookimpl(wrapper=True)(refuse_compiles)


@pytest.fixture
def short_folder():
    """A folder whose path leaves room for that of a socket, which ``tmp_path`` does not."""
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hands whole files to the workers, in the order in which they were collected: the slow ones come first.

    But what asks the session's two servers goes to where these are: each of them with its own requests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            server = re.search(r"\[(manual|aot)\b", test)
            if not file.startswith("tests/e2e/"):
                return file
            if server:
                return f"server {server[1]}"
            return "server aot" if file == "tests/e2e/test_end.py" else file  # its servers load what that one has compiled

    config.option.loadscopereorder = False
    return Files(config, log)
