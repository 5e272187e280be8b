"""Records a run: the hook, the thread that writes, and the claim on a folder."""
