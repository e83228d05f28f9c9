"""The command line: ``python -m extops doctor``."""

import signal
import sys

from extops import _doctor

# A reader that has seen enough, such as `head`, ends this program as it ends others: without a traceback.
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
sys.exit(_doctor.main())
