"""Layouts and swizzles, and TileTensor: views by tile and distribute."""
