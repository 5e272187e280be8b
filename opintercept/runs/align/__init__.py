"""Two runs compared whose modules have other names."""
