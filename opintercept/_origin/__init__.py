"""Where calls come from: their module, source line, forward call and autocast dtype."""
