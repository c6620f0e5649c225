"""Parts of ``bench.train_repro``."""

import importlib.util

from dashcupy.errors import UnsupportedError

if importlib.util.find_spec("torch") is None:
    raise UnsupportedError("a training run needs PyTorch, which is not installed; "
                           "pip install torch")
