"""`intercept` and its blocks: `with`, decorators, pauses, coroutines, greenlets."""
