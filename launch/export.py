"""megapack-export of this checkout, for launchers that take a path; see there."""

import sys

from megapack.training.export import main

if __name__ == "__main__":
    sys.exit(main())
