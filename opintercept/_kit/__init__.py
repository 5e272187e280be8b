"""What hooks are made of: helpers for those who write one."""
