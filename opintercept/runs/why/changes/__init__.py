"""The single changes of a region of A that are tried, to name what B does otherwise there."""
