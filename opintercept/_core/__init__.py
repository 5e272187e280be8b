"""The call, hooks and the pipeline that runs them: what the rest rests on. Nothing here imports torch."""
