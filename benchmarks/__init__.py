"""Measurements of what interception costs; see README.md here."""
