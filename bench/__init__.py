"""Measurements of dashcupy and its peers; see ``README.md`` in this folder."""
