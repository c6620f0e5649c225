"""``python -m dashcupy``."""

import sys

from .cli import main

sys.exit(main())
