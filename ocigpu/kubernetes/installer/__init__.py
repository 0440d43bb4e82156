"""``ocigpu node-installer``: puts the package of an image on the host and enters it in its engine."""
