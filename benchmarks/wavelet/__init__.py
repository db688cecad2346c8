"""The tables of DP-Wavelet on two image sets: `python -m benchmarks.wavelet`."""
