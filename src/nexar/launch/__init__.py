"""Starts ranks, and joins the cluster that a process was started for."""
