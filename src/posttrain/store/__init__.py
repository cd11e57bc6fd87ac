"""Database, blobs and attempt folders."""
