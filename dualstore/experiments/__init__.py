"""Experiments of the papers beyond their image runs."""
