"""Says what one program does otherwise than another, and what that costs."""
