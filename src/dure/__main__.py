"""`python -m dure`: the command line, also for `torchrun -m dure`."""

import sys

from dure.cli import main

sys.exit(main())
