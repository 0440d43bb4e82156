"""``ocigpu engine``: engines configured, tested and left."""
