"""``python -m ocigpu.cli.main``."""

from ocigpu.cli.main import main

main()
