"""The command line: ``python -m extops doctor``."""

import sys

from extops import _doctor

sys.exit(_doctor.main())
