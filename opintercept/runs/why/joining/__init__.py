"""Joins the calls of two programs by the rows of their weights, whatever their modules are called."""
