"""Frozen text-to-image models of diffusers as velocity models on codes."""
