"""``python -m moe_inductor``: the console script ``megamoe`` where scripts are not on the path."""

import sys

from .cli import main

sys.exit(main())
