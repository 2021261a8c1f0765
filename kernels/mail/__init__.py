"""Kernels around the exchange of mail between nodes, which another engine makes (`layouts/maps/mail.py`)."""
