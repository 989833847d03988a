"""Encoders and decoders of the wire format. Pure: no I/O, no clock, no lock."""
