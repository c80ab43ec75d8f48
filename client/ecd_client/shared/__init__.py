"""The client's side of the board: reading and writing without a call."""
