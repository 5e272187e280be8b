"""Recording: the hook, the thread that writes, and the claim on a folder."""
