"""Where calls come from: module, source line, forward call and autocast."""
