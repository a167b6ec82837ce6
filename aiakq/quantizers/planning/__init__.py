"""Planning: bits, group sizes and storage of each layer, decided before any weight is read."""
