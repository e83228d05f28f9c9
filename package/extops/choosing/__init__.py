"""What computes a layer: our kernels or torch's own, and in how many pieces where its input is packed."""
