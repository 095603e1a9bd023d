"""The command line: arguments, flags, exit codes and processes."""
