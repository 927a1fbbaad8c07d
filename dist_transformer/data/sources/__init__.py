"""Readers of the user's text: files, tables, Hub datasets and addresses, in order and in batches."""
