"""The path of a call, one file per hop."""
