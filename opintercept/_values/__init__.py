"""What is read of a tensor: statistics, hashes, copies."""
