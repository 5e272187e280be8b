"""What `opintercept show` reports of runs: groups of calls, steps, and single calls, as rows and as text."""
