"""The ranks of a distributed program: which they are, what they exchange, and what should be equal on which."""
