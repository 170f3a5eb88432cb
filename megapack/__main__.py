"""``python -m megapack`` is ``megapack-build``."""

import sys

from megapack.cli.main import main

sys.exit(main())
