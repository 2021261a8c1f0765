"""TileTensor: views of tensors by tile, vectorize and distribute, on host and device."""
