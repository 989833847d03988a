"""Metrics, the status page, and the analysis of dumps and traces."""
