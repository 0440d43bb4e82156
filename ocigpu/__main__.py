"""``python -m ocigpu`` is ``ocigpu``."""

from ocigpu import leave
from ocigpu.cli.front.main import main

leave(main())
