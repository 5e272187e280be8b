"""A run on disk: its files, their formats, and their reader."""
