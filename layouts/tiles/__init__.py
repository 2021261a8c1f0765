"""Layouts and swizzles, and TileTensor: views by tile, vectorize and distribute."""
