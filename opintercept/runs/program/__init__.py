"""What was recorded as a program: which of its calls may run again, and the one place that runs them."""
