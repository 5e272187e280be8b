"""`Checksum`: finds wrong products."""
