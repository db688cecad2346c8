"""Feature maps of released mean embeddings: Fourier, Hermite and tangent features."""
