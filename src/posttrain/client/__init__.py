"""`Control` over HTTP: the same verbs, answered by a server."""
