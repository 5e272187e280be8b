"""What a difference of two losses is made of: which calls, weights and inputs, and how much each of them."""
