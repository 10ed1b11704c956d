"""Attention: forms of MLA, backends, and the walk that is shared by the rows of a request."""
