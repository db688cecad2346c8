"""DP-Wavelet: transform, tokens by scale, the spectral tokenizer and what predicts them."""
