"""The library in C++: how it is built and found, and what of it needs no engine."""
