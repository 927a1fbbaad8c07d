"""The command line: the only place where the parts are wired together. One file a verb, heavy imports inside."""
