"""Several plans or runs on one private data set, side by side: for the curator alone."""
