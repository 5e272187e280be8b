"""The three ways to feed the pipeline, and what they share: which block watches what in which thread."""
