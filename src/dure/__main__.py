"""`python -m dure`: the command line, also for `torchrun -m dure`."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback

from dure.cli.main import main

sys.exit(main())
