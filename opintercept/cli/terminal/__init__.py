"""Output of commands to a terminal: tables, a progress bar, colours."""
