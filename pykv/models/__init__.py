"""Architectures, one file each, named as general.architecture."""
