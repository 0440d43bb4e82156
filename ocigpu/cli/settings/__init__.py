"""``ocigpu config``: settings, ours and the vendor's."""
