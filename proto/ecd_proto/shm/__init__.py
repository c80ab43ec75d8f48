"""The layout of the memory that a daemon and its clients share, one idea a file."""
