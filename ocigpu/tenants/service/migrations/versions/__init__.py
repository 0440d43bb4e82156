"""The revisions; ``tables.REVISION`` names the newest."""
