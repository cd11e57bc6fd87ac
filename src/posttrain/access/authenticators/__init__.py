"""Authenticators, one file each."""
