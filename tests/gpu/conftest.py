"""GPU tests: each bounds its own time, and leaves neither memory nor a broken GPU to the next."""

import faulthandler
import os
import sys

import pytest

# JAX would take three quarters of the card at its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Processes of pytest-xdist side by side, each with a thread for every core, take seconds for what
# one thread does at once.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A kernel that hangs cannot be interrupted from Python, so the process ends itself and says where.
# Under pytest-xdist that costs one worker, and the run goes on. A test that starts processes of its
# own asks for more with `support.limit`.
LIMIT_S = 45


@pytest.fixture(scope="session")
def real_stderr(request):
    """A handle of the terminal's stderr; pytest has put a file in its place."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        handle = os.dup(2)
    yield handle
    os.close(handle)


@pytest.fixture(autouse=True)
def bounded_time(request, real_stderr):
    """End the process with a traceback when a test takes longer than it may."""
    limit_s = getattr(request.function, "limit_s", LIMIT_S)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def healthy_gpu(request, real_stderr, bounded_time):
    """Stop when a test has left an error that no later call can clear; give large memory back.

    A test begins on GPU 0: XLA leaves another one current where there are several, also where
    torch has not been used yet. What starts XLA after this is ``support.jax_on_the_gpu``.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.set_device(0)
    yield
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        text = f"\n{request.node.nodeid} left the GPU unusable: {str(error).splitlines()[0]}\n"
        os.write(real_stderr, text.encode())
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(70)  # pytest-xdist starts another worker
        pytest.exit(text, returncode=70)
    if torch.cuda.memory_reserved() > 8 << 30:
        torch.cuda.empty_cache()
