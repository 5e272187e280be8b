"""The pytest plugin: the fixture `op_calls`, its expectations and its snapshots."""
