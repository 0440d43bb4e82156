"""``ocigpu cdi``: CDI specifications written, read, checked, compared and kept fresh."""

import typer

from ocigpu.cli.cdi_generate import (
    DIFF_EPILOG,
    GENERATE_EPILOG,
    REFRESH_EPILOG,
    diff_command,
    generate_command,
    refresh_command,
)
from ocigpu.cli.cdi_list import LIST_EPILOG, list_command
from ocigpu.cli.cdi_show import SHOW_EPILOG, show_command, transform_app
from ocigpu.cli.cdi_validate import VALIDATE_EPILOG, validate_command

CDI_EPILOG = """\
\b
Examples:
  ocigpu cdi generate --output /etc/cdi/nvidia.yaml
  ocigpu cdi list
  ocigpu cdi show nvidia.com/gpu=0
  ocigpu cdi validate
"""

cdi_app = typer.Typer(
    help="Specifications of the Container Device Interface (CDI).", epilog=CDI_EPILOG, rich_markup_mode=None
)
cdi_app.command("generate", epilog=GENERATE_EPILOG)(generate_command)
cdi_app.command("list", epilog=LIST_EPILOG)(list_command)
cdi_app.command("show", epilog=SHOW_EPILOG)(show_command)
cdi_app.command("validate", epilog=VALIDATE_EPILOG)(validate_command)
cdi_app.command("diff", epilog=DIFF_EPILOG)(diff_command)
cdi_app.command("refresh", epilog=REFRESH_EPILOG)(refresh_command)
cdi_app.add_typer(transform_app, name="transform")
