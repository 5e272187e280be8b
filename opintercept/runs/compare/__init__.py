"""Two runs compared: which call belongs to which, how they differ, and where the difference comes from."""
