"""Text where users have it: files, tables, Hub datasets and addresses, in order and in batches."""
