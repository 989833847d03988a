"""Starts ranks, and joins the cluster a process was started for."""
