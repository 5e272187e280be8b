"""The report: one HTML page about one or two runs."""
