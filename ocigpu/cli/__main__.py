"""``python -m ocigpu.cli``."""

import sys

from ocigpu.cli.front.main import main

sys.exit(main())
