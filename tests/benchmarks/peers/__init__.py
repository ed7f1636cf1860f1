"""Measurements beside other implementations; see README.md. Not part of CI."""
