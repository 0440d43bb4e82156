"""``ocigpu cdi``: CDI specifications, written, read, compared and kept new."""
