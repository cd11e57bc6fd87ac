"""Engines that generate."""
