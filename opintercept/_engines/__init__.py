"""The four engines that feed the pipeline, and what they share: which block watches what in which thread."""
