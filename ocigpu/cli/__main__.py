"""``python -m ocigpu.cli``."""

import sys

from ocigpu.cli.main import main

sys.exit(main())
