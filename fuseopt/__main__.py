"""`python -m fuseopt`."""

import sys

from fuseopt.cli import main

sys.exit(main())
